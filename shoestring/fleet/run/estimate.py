"""From jobs and profiles to the input of the allocator: demands, pools and pairs.

A job's batch size is the one it was started with; before that, of those allowed and fitting,
the one that finishes soonest on the fastest kind when its length is given in epochs, and the
first of its list when it is given in steps.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from shoestring.fleet.allocate.plan import Demand, Pool
from shoestring.fleet.engine.devices import Device
from shoestring.fleet.measure.interference import Interference, Load
from shoestring.fleet.measure.profile import MARGIN, VERSION, Profile
from shoestring.fleet.run.database import OPEN, Database, Entry

Profiles = Mapping[str, Profile]  # by kind


@dataclass(frozen=True)
class Estimates:
    """The input of one decision: all open jobs, the devices, and how jobs slow each other."""

    demands: list[Demand]
    pools: list[Pool]
    pairs: Interference
    batches: Mapping[str, int]
    restart_cost_s: float
    unplanned: Mapping[str, str] = field(default_factory=dict)  # jobs that cannot be planned, and why


def pools_of(devices: Sequence[Device]) -> list[Pool]:
    """Count devices by kind; memory is that of the smallest."""
    kinds: dict[str, list[Device]] = {}
    for device in devices:
        kinds.setdefault(device.kind, []).append(device)
    return [Pool(kind, len(own), min(d.usable_bytes for d in own)) for kind, own in kinds.items()]


def measured_profiles(database: Database, key: str, devices: Sequence[Device]) -> dict[str, Profile]:
    """A job's measured profiles by kind; of a CPU kind, those that were taken as they are now."""
    kinds = {device.kind: device for device in devices}
    known = {kind: Profile.from_json(text) for kind, text in database.profiles(key).items() if kind in kinds}
    return {kind: found for kind, found in known.items() if kinds[kind].is_gpu or found.version == VERSION}


def load_profiles(database: Database, key: str, devices: Sequence[Device]) -> dict[str, Profile]:
    """A job's profiles by kind: the measured ones, and predictions for others whose rates are known."""
    kinds = {device.kind: device for device in devices}
    found = measured_profiles(database, key, devices)
    for kind, other in kinds.items():
        guesses = [
            profile.on(kind, own.rates, other.rates)
            for profile in found.values()
            if not profile.predicted_from
            and (own := kinds[profile.kind]).rates is not None
            and other.rates is not None
            and own.is_gpu == other.is_gpu  # memory on one says nothing about the other
        ]
        if kind not in found and guesses:
            found[kind] = min(guesses, key=lambda guess: guess.uncertainty)
    return found


def estimate(
    entries: Sequence[Entry],
    devices: Sequence[Device],
    profiles_of: Callable[[Entry], Profiles],
    *,
    steps_s: Mapping[tuple[str, str], float] | None = None,
    seen: Mapping[tuple[str, str, str], tuple[float, float]] | None = None,
    now: float | None = None,
) -> Estimates:
    """Say what every open job still needs. `steps_s` are speeds seen while running, by job and kind."""
    pools = pools_of(devices)
    memory = {pool.kind: pool.memory_bytes or 0 for pool in pools}
    kind_of = {device.name: device.kind for device in devices}
    now = time.time() if now is None else now
    demands: list[Demand] = []
    batches: dict[str, int] = {}
    loads: dict[tuple[str, str], Load] = {}
    unplanned: dict[str, str] = {}
    startups = [0.0]
    for entry in entries:
        if entry.state not in OPEN or entry.is_unwanted:
            continue
        name = entry.job.name
        usable = {k: p for k, p in profiles_of(entry).items() if not entry.job.kinds or k in entry.job.kinds}
        if not usable:
            unplanned[name] = _why_not(entry, memory)
            continue
        batch = entry.batch or choose_batch(entry, usable, memory)
        fitting = {kind: p for kind, p in usable.items() if batch and p.fits(batch, memory[kind])}
        if not batch or not fitting:
            unplanned[name] = f"`{name}` waits: no batch size it allows fits the memory of any device"
            continue
        batches[name] = batch
        work = f"{entry.key}:{batch}"
        for kind, profile in fitting.items():
            loads[work, kind] = Load(profile.busy, profile.bandwidth)
            startups.append(profile.startup_s)
        remaining = entry.job.total_steps(batch) - entry.steps
        demands.append(
            Demand(
                job=name,
                kind_of_work=work,
                remaining_steps=max(1, remaining),
                speeds=_speeds(name, fitting, batch, steps_s or {}),
                devices=entry.job.devices,
                weight=entry.job.priority,
                deadline_s=_until(entry, now),
                memory_bytes={kind: sum(p.peak_bytes(batch)) for kind, p in fitting.items()},
                running_on=kind_of.get(entry.device.partition("+")[0]) if entry.state == "running" else None,
                waited_s=max(0.0, now - entry.added_at),
            )
        )
    return Estimates(demands, pools, Interference(loads, seen or {}), batches, max(startups), unplanned)


def choose_batch(entry: Entry, profiles: Profiles, memory: Mapping[str, int]) -> int | None:
    """Choose the batch size to start a job with; None if none fits anywhere."""
    options = {
        batch: [_total_s(entry, p, batch) for kind, p in profiles.items() if p.fits(batch, memory[kind])]
        for batch in entry.job.batches
    }
    possible = [batch for batch, times in options.items() if times]
    if not possible:
        return None
    return possible[0] if entry.job.steps else min(possible, key=lambda batch: min(options[batch]))


def memory_cap(profile: Profile, batch: int) -> int:
    """The most memory a job may take where it shares a device."""
    peak, error = profile.peak_bytes(batch)
    return math.ceil((peak + error) * (1 + MARGIN))


def _total_s(entry: Entry, profile: Profile, batch: int) -> float:
    return entry.job.total_steps(batch) * profile.step_s(batch)[0]


def _speeds(
    name: str, profiles: Profiles, batch: int, seen: Mapping[tuple[str, str], float]
) -> dict[str, float]:
    """Steps a second by kind: those seen on kinds where the job ran, and scaled profiles elsewhere.

    The profile's speeds are scaled by the mean ratio of seen speed to profile: a job that is slower
    than its profile on one kind is most often slower on all. Unscaled speeds of other kinds would
    look faster than they are, and move the job there for nothing.
    """
    speeds = {kind: _speed(profile, batch) for kind, profile in profiles.items()}
    ratios = [seen[name, k] / speed for k, speed in speeds.items() if speed > 0 and (name, k) in seen]
    ratio = sum(ratios) / len(ratios) if ratios else 1.0
    return {kind: seen.get((name, kind)) or speed * ratio for kind, speed in speeds.items()}


def _speed(profile: Profile, batch: int) -> float:
    step_s = profile.step_s(batch)[0]
    return 1 / step_s if step_s > 0 else 0.0


def _until(entry: Entry, now: float) -> float | None:
    if entry.job.deadline_s is None:
        return None
    return max(1.0, entry.added_at + entry.job.deadline_s - now)


def _why_not(entry: Entry, memory: Mapping[str, int]) -> str:
    name, kinds = entry.job.name, entry.job.kinds
    if kinds and not set(kinds) & set(memory):
        return f"`{name}` waits: it may use {', '.join(kinds)} only, and this fleet has none"
    return f"`{name}` waits to be profiled: see `shoestring fleet profile {name}`"
