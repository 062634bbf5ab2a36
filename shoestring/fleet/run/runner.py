"""Run a fleet: decide, start, stop and resume, until every job is done.

The database is the truth: a job is in it before it runs, and what happens to it is written when
it happens. The planner says which job runs on which kind, `place_jobs` on which devices. The
runner never lets jobs of two placements run on one device: it starts a job only when its
devices are free. A job that is to move is asked to stop and goes on from its checkpoint.

A new decision is made when a job comes, ends or leaves, and every `round_s`. A planner that
fails changes nothing: the last plan stands.
"""

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shoestring.errors import FleetError, ShoestringError
from shoestring.fleet.allocate.placement import place_jobs
from shoestring.fleet.allocate.plan import Placement, Plan
from shoestring.fleet.contract import BATCH, STOPPED
from shoestring.fleet.engine.base import Engine, Task
from shoestring.fleet.engine.devices import Device
from shoestring.fleet.measure.interference import add_sight
from shoestring.fleet.measure.profile import Profiler
from shoestring.fleet.run.database import OPEN, Database, Entry
from shoestring.fleet.run.estimate import (
    Estimates,
    Profiles,
    estimate,
    load_profiles,
    measured_profiles,
    memory_cap,
)
from shoestring.fleet.run.life import Life
from shoestring.fleet.run.planners import Planner

CHECKPOINT_S = 10.0  # between checkpoints, where a job does not say
_STOP_S = 20.0  # how long a job may take to its next checkpoint, beyond what is expected
_STOPPING_S = 0.05  # between looks at jobs that were asked to stop
_COUNTED_S = 5.0  # a window that is long enough to be remembered


@dataclass
class Runner:
    """Runs the jobs of a database on an engine. One thread, which holds the database's lock."""

    database: Database
    engine: Engine
    planner: Planner
    profiler: Profiler | None = None  # without one, jobs that were not profiled wait
    round_s: float = 60.0
    say: Callable[[str], None] = field(default=lambda text: None)
    plan: Plan | None = None
    lives: dict[str, Life] = field(default_factory=dict)
    _speeds: dict[tuple[str, str], float] = field(default_factory=dict)
    _decided_at: float = 0.0
    _known: frozenset[str] = frozenset()
    _is_stale: bool = True

    def look(self) -> bool:
        """Do what is to be done now; return whether anything is left to wait for."""
        self._follow()
        self._drop_unwanted()
        entries = [e for e in self.database.entries() if e.state in OPEN and not e.is_unwanted]
        names = frozenset(entry.job.name for entry in entries)
        self._is_stale |= names != self._known
        self._known = names
        if self._measure(entries):
            entries = [self.database.entry(entry.job.name) for entry in entries]
            entries = [entry for entry in entries if entry.state in OPEN]
        if entries and (self._is_stale or time.monotonic() - self._decided_at > self.round_s):
            self._decide(entries)
        self._act(entries)
        return bool(entries or self.lives)

    def wait(self, timeout_s: float) -> None:
        """Let some time pass before the next look; less of it when a job ends."""
        for life in self.lives.values():
            life.running.wait(timeout_s)
            return
        time.sleep(timeout_s)  # nothing runs: only the database tells that another process added a job

    def stop(self, grace_s: float = 60.0) -> None:
        """Ask all jobs to stop at a checkpoint, wait for them, end those that do not; none is left."""
        try:
            for life in self.lives.values():
                self._ask_stop(life)
            deadline = time.monotonic() + grace_s
            while self.lives and time.monotonic() < deadline:
                self._follow()
                self.wait(_STOPPING_S)
        finally:
            for life in list(self.lives.values()):
                life.running.kill()
                self._follow()

    def _follow(self) -> None:
        """Read the events of running jobs, and handle the jobs that ended."""
        for life in list(self.lives.values()):
            life.follow()
            self._learn(life)
            if life.steps is not None:
                self.database.tell(life.job, steps=life.steps, ends_at=self._ends_at(life))
            overdue = life.stop_by is not None and time.monotonic() > life.stop_by
            if overdue:
                life.running.kill()
            code = life.running.poll()
            if code is not None:
                life.follow()
                self._end(life, code)

    def _end(self, life: Life, code: int) -> None:
        del self.lives[life.job]
        self._is_stale = True
        self._note_partners()
        entry = self.database.entry(life.job)
        steps = max(entry.steps, life.steps or 0)
        self.database.tell(life.job, steps=steps)
        asked = life.stop_by is not None
        if code == 0:
            self.database.move(life.job, "done", device=life.place, note=f"{steps} steps")
            self.say(f"`{life.job}` is done")
        elif asked or code == STOPPED:
            note = "stopped at a checkpoint" if code == STOPPED else "ended before its next checkpoint"
            self.database.move(life.job, "stopped", note=note)
        else:
            self.database.move(
                life.job, "failed", device=life.place, note=f"exit code {code} after {steps} steps"
            )
            self.say(f"`{life.job}` failed with exit code {code}: see `shoestring fleet logs {life.job}`")

    def _drop_unwanted(self) -> None:
        for entry in self.database.entries():
            name = entry.job.name
            if entry.is_unwanted:
                if name in self.lives:
                    self.lives.pop(name).running.kill()
                    self._note_partners()
                self.database.forget(name)
                shutil.rmtree(self.database.job_folder(name), ignore_errors=True)
                self._is_stale = True

    def _measure(self, entries: Sequence[Entry]) -> bool:
        """Profile jobs on idle devices of kinds they have not been measured on; say whether any was."""
        if self.profiler is None:
            return False
        busy = {device.name for life in self.lives.values() for device in life.devices}
        idle = {d.kind: d for d in self.engine.devices if d.name not in busy}
        measured = False
        for entry in entries:
            if entry.job.name in self.lives:
                continue
            known = measured_profiles(self.database, entry.key, self.engine.devices)
            for kind, device in idle.items():
                if kind in known or (entry.job.kinds and kind not in entry.job.kinds):
                    continue
                measured = self._is_stale = True
                self.database.tell(entry.job.name, note=f"it is being profiled on `{device.name}`")
                try:
                    profile = self.profiler.profile(entry.job, device, busy)
                    self.database.save_profile(entry.key, kind, profile.to_json())
                except FleetError as error:
                    self.say(f"`{entry.job.name}` could not be profiled: {error.message}")
                    self.database.move(entry.job.name, "failed", note=f"not profiled: {error.message[:500]}")
                    break
        return measured

    def _decide(self, entries: Sequence[Entry]) -> None:
        estimates = self._estimate(entries)
        self._decided_at, self._is_stale = time.monotonic(), False
        for name, why in estimates.unplanned.items():
            self.database.tell(name, note=why)
        if not estimates.demands:
            self.plan = Plan(())
            return
        try:
            self.plan = self.planner(estimates, self.plan)
        except ShoestringError as error:
            self.say(f"no new plan: {error.message}")
            return
        for name, why in self.plan.reasons.items():
            self.database.tell(name, note=why)

    def _estimate(self, entries: Sequence[Entry]) -> Estimates:
        return estimate(
            entries,
            self.engine.devices,
            self._profiles,
            steps_s=self._speeds,
            seen=self.database.pairs(),
        )

    def _profiles(self, entry: Entry) -> Profiles:
        return load_profiles(self.database, entry.key, self.engine.devices)

    def _act(self, entries: Sequence[Entry]) -> None:
        """Stop and start jobs, so that those that run come closer to the plan."""
        if self.plan is None:
            return
        devices = {device.name: device for device in self.engine.devices}
        places = place_jobs(
            self.plan.placements,
            {device.name: device.kind for device in devices.values()},
            {name: life.device_names for name, life in self.lives.items()},
        )
        for name, life in self.lives.items():
            if name in places.leaving:
                self._ask_stop(life)
            elif life.stop_by is not None:  # a later decision leaves it where it is
                life.running.withdraw_stop()
                life.stop_by = None
        for entry in entries:
            name = entry.job.name
            target = tuple(devices[own] for own in places.devices.get(name, ()))
            place = self.plan.placement_of(name)
            if target and place and name not in self.lives and self._is_free(target, place):
                self._start(entry, target, place)

    def _is_free(self, target: Sequence[Device], place: Placement) -> bool:
        wanted = {device.name for device in target}
        return all(
            life.job in place.jobs
            for life in self.lives.values()
            if wanted & {device.name for device in life.devices}
        )

    def _start(self, entry: Entry, devices: tuple[Device, ...], place: Placement) -> None:
        name, kind = entry.job.name, devices[0].kind
        profile = self._profiles(entry)[kind]
        batch = self._estimate([entry]).batches[name]
        folder = self.database.job_folder(name)
        task = Task(
            name=name,
            command=entry.job.command(batch),
            devices=devices,
            folder=folder,
            checkpoint=folder / "checkpoints",
            every=entry.job.every or max(1, round(CHECKPOINT_S / profile.step_s(batch)[0])),
            # On a CPU the limit counts what is only reserved as well: a tight one would end healthy jobs.
            memory_bytes=memory_cap(profile, batch)
            if place.is_packed and devices[0].is_gpu
            else devices[0].usable_bytes,
            environment={BATCH: str(batch)},
        )
        speed = place.speeds[place.jobs.index(name)]
        why = self.plan.reasons.get(name, "") if self.plan else ""
        life = Life(name, f"{entry.key}:{batch}", task, self.engine.start(task), speed)
        self.lives[name] = life
        self.database.move(name, "running", device=life.place, note=why, batch=batch)
        self._note_partners()

    def _ask_stop(self, life: Life) -> None:
        if life.stop_by is None:
            life.running.ask_stop()
            expected_s = life.task.every / max(1e-9, life.predicted_steps_s)
            life.stop_by = time.monotonic() + _STOP_S + 2 * expected_s

    def _note_partners(self) -> None:
        for life in self.lives.values():
            others = [o for o in self.lives.values() if o is not life and set(o.devices) & set(life.devices)]
            life.share_with(others[0].work if others else "")

    def _learn(self, life: Life) -> None:
        """Remember how fast a job is: alone for its next decisions, beside another for the pair."""
        speed = life.speed()
        if speed is None or speed[1] < _COUNTED_S:
            return
        alone = self._speeds.get((life.job, life.kind))
        if not life.partner:
            self._speeds[life.job, life.kind] = speed[0]
        elif alone:
            seen = self.database.pairs().get((life.kind, life.work, life.partner))
            factor, seconds = add_sight(seen, min(1.0, speed[0] / alone), speed[1])
            self.database.save_pair(life.kind, life.work, life.partner, factor, seconds)
            life.restart_window()

    def _ends_at(self, life: Life) -> float | None:
        speed = life.speed()
        steps_s = speed[0] if speed else life.predicted_steps_s
        entry = self.database.entry(life.job)
        if entry.batch is None or life.steps is None or steps_s <= 0:
            return None
        return time.time() + max(0, entry.job.total_steps(entry.batch) - life.steps) / steps_s
