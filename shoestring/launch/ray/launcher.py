"""Run a script as workers on a Ray cluster, with a shard on each of their nodes.

Ray places the processes, starts them on their nodes and tells when one is gone; what they
say to each other goes over their own connections, as everywhere else. An actor (`process.py`)
holds one process; the driver, here, follows all actors.

What happens when something is lost:

- A worker that was killed, or whose actor is gone, is started again by Ray, elsewhere if its
  node is lost, and joins the run as a new incarnation: with its data, schedule and buffers from
  the newest checkpoint where there is one, with the parameters of the shards in any case.
- A shard that is gone takes its part of the parameters with it. All processes are stopped and
  started again from the newest checkpoint, on the nodes that are there then: fewer, or more.
  With a named codec the rounds since the checkpoint come out as they were, bit for bit.
- A script that fails by itself ends the run with its exit code, as on one machine.

Promises: when `run_ray` returns or raises, nothing that it started on the cluster is left; when
the driver is killed Ray ends its actors, and they their processes. Between nodes there are always
keys, made anew for each start.
"""

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from shoestring.checkpoint.resume import AUTO, begin
from shoestring.config import Launch, Run
from shoestring.errors import JoinError
from shoestring.launch.group import group_variables, some_port
from shoestring.launch.outcome import Failure, Outcome
from shoestring.launch.ray.cluster import Cluster, open_cluster, parse_address
from shoestring.launch.ray.keys import RunKeys
from shoestring.launch.ray.nodes import Places, place
from shoestring.launch.ray.process import ProcessActor, ProcessSpec, Report, tcp_address
from shoestring.launch.shard import ShardArguments
from shoestring.launch.signals import signals_as_exceptions, signals_ignored
from shoestring.observe.progress import Board, Display

_POLL_S = 1.0  # how long an actor holds a question until it has something to say
_LOOK_S = 0.25
_ANSWER_S = 5.0  # for an actor to answer a question that it need not wait with
_KILLED = 128  # exit codes above it: ended by a signal


def run_on_ray(
    command: list[str],
    run: Run,
    launch: Launch,
    *,
    environment: Mapping[str, str],
    say: Callable[[str], None] = lambda text: None,
) -> Outcome:
    """Run `command` on the cluster that `launch.on` names (`ray://HOST:PORT`), and disconnect."""
    working_dir = str(launch.working_dir or "")
    cluster = open_cluster(
        parse_address(launch.on), allow_open=launch.allow_open_ray, working_dir=working_dir
    )
    try:
        return run_ray(command, run, cluster, launch, environment, say)
    finally:
        cluster.close()


def run_ray(
    command: list[str],
    run: Run,
    cluster: Cluster,
    launch: Launch,
    environment: Mapping[str, str],
    say: Callable[[str], None],
) -> Outcome:
    """Run `command` once for each of the run's workers on a cluster, and wait for all of them.

    `environment` is what workers are given beside the run.
    """
    began = time.monotonic()
    outcome = Outcome(exit_codes=[None] * run.workers)
    board = Board()
    display = Display(board)
    worker = _WorkerPlan(tuple(command), environment, "" if launch.working_dir else os.getcwd())
    left = launch.restarts
    with signals_as_exceptions():
        try:
            while True:
                actors = _Actors(worker, run, cluster, replace(launch, restarts=left), board, display, say)
                try:
                    actors.start()
                    actors.wait()
                finally:
                    with signals_ignored():
                        actors.stop()
                left = actors.restarts - 1
                if actors.lost is None or left < 0:
                    break
                say(f"{actors.lost} is gone: starting all workers and shards again")
                # Processes of these actors that are left must not change the folder from now on.
                run = replace(run, resume=begin(AUTO, run.checkpoint, say) or run.resume)
        finally:
            display.close()
    outcome.exit_codes = actors.codes
    outcome.failure = actors.failure
    outcome.count(board)
    if actors.lost is not None:
        outcome.failure = Failure(actors.lost, 1, (f"lost, and {launch.restarts} restarts were used up",))
    outcome.seconds = time.monotonic() - began
    return outcome


@dataclass(frozen=True)
class _WorkerPlan:
    """What all workers start with: the script, variables, the folder."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    folder: str


@dataclass
class _Member:
    """An actor and its process, as the driver sees them."""

    who: str
    actor: Any
    node: str
    worker: int | None = None
    asked_at: float = 0.0
    code: int | None = None
    last_lines: tuple[str, ...] = ()

    @property
    def prefix(self) -> str:
        return "" if self.worker == 0 else f"[{self.who}] "


class _Actors:
    """All actors of a run, from one start to the next."""

    def __init__(
        self,
        worker: _WorkerPlan,
        run: Run,
        cluster: Cluster,
        launch: Launch,
        board: Board,
        display: Display,
        say: Callable[[str], None],
    ) -> None:
        self.failure: Failure | None = None
        self.lost: str | None = None  # who was lost, so that all must start again
        self.codes: list[int | None] = [None] * run.workers
        self.restarts = launch.restarts
        self._worker = worker
        self._run = run
        self._ray = cluster.ray
        self._cluster = cluster
        self._launch = launch
        self._board = board
        self._display = display
        self._say = say
        self._places: Places | None = None
        self._members: list[_Member] = []
        self._asked: dict[Any, _Member] = {}

    def start(self) -> None:
        """Start the shards, and when they listen the workers."""
        launch, run = self._launch, self._run
        self._places = places = place(
            self._cluster,
            run.workers,
            launch.shards,
            cpus=launch.cpus_per_worker,
            gpus=launch.gpus_per_worker,
            timeout_s=launch.place_timeout_s,
        )
        shards = len(places.shards)
        is_together = len(places.nodes) == 1
        keys = None if is_together else RunKeys.make(run.workers)
        self._say(f"{run.workers} workers and {shards} shards on {len(places.nodes)} Ray nodes")
        workers_on = Counter(node.id for node in places.workers)
        for index, node in enumerate(places.shards):
            address = "" if is_together else tcp_address(node.address)
            threads = max(1, int(node.cpus) // (1 + workers_on[node.id]))
            shard = ShardArguments(index, shards, run, address, threads)
            spec = ProcessSpec(run, shard=shard, keys=keys.for_shard() if keys else {})
            actor = self._actor(places.shard_options(index), spec)
            self._members.append(_Member(f"shard {index}", actor, node.id))
        addresses = self._addresses()
        if self.lost is not None:
            return
        run = replace(run, shards=addresses, incarnation=1)
        seen: Counter[str] = Counter()
        meeting = (places.workers[0].address, some_port())
        for worker, node in enumerate(places.workers):
            # A worker that was given GPUs sees no others: its first one is its own.
            local = 0 if places.gpus else seen[node.id]
            seen[node.id] += 1
            own = replace(run, worker=worker, local=local)
            spec = ProcessSpec(
                own,
                self._worker.command,
                keys=keys.for_worker(worker) if keys else {},
                environment={
                    **self._worker.environment,
                    **group_variables(own, workers_on[node.id], *meeting),
                },
                threads=launch.threads_per_worker or max(1, int(node.cpus) // workers_on[node.id]),
                folder=self._worker.folder,
            )
            options = places.worker_options(worker) | {"max_restarts": self.restarts, "max_task_retries": -1}
            self._members.append(_Member(f"worker {worker}", self._actor(options, spec), node.id, worker))

    def wait(self) -> None:
        """Return when all workers have ended, one has failed, or a shard is lost."""
        if self.lost is not None:
            return
        for member in self._members:
            self._ask(member)
        while self.failure is None and self.lost is None and None in self.codes:
            done, _ = self._ray.wait(list(self._asked), timeout=_LOOK_S)
            for ref in done:
                self._hear(self._asked.pop(ref), ref)
            now = time.monotonic()
            for member in self._asked.values():
                if now - member.asked_at > self._launch.actor_timeout_s + _POLL_S:
                    self.lost = member.who
            self._display.refresh()

    def stop(self) -> None:
        """End what is left, wait for it, and give the places back."""
        is_well = self.failure is None and self.lost is None and all(code == 0 for code in self.codes)
        grace_s = self._run.save_timeout_s if is_well else self._run.stop_grace_s
        alive = {node.id for node in self._cluster.nodes()}
        for member in self._members:
            if member.node not in alive:
                self._ray.kill(member.actor)  # before Ray starts it elsewhere
        left = [member for member in self._members if member.node in alive]
        workers = [member for member in left if member.worker is not None]
        shards = [member for member in left if member.worker is None]
        for members in (workers, shards):  # a shard without workers has nothing more to do
            stops = {member.actor.stop.remote(grace_s): member for member in members}
            if stops:
                done, silent = self._ray.wait(
                    list(stops), num_returns=len(stops), timeout=grace_s + _ANSWER_S
                )
                for ref in done:
                    self._say_goodbye(stops[ref], ref)
                for ref in (*done, *silent):
                    self._ray.kill(stops[ref].actor)
        if self._places is not None:
            self._places.close()

    def _say_goodbye(self, member: _Member, stopped: Any) -> None:
        """Take what an actor still has to report, and let it clean up; unless it is gone."""
        with suppress(self._ray.exceptions.RayError):
            self._ray.get(stopped)
            deadline = time.monotonic() + _ANSWER_S
            while member.code is None and time.monotonic() < deadline:
                self._take(member, self._ray.get(member.actor.poll.remote(0.0), timeout=_ANSWER_S))
            self._ray.get(member.actor.close.remote(), timeout=_ANSWER_S)

    def _actor(self, options: dict[str, Any], spec: ProcessSpec) -> Any:
        return self._ray.remote(ProcessActor).options(max_concurrency=4, **options).remote(spec)

    def _addresses(self) -> tuple[str, ...]:
        """Where the shards listen, once all of them do."""
        asked = [member.actor.address.remote() for member in self._members]
        found = []
        for member, ref in zip(self._members, asked, strict=True):
            try:
                address, message, hint = self._ray.get(ref, timeout=self._run.ready_timeout_s + _ANSWER_S)
            except self._ray.exceptions.RayError:
                self.lost = member.who
                return ()
            if message:
                raise JoinError(message, hint=hint)
            found.append(address)
        return tuple(found)

    def _ask(self, member: _Member) -> None:
        member.asked_at = time.monotonic()
        self._asked[member.actor.poll.remote(_POLL_S)] = member

    def _hear(self, member: _Member, ref: Any) -> None:
        try:
            report = self._ray.get(ref)
        except self._ray.exceptions.RayError:
            self.lost = member.who
            return
        self._take(member, report)
        if member.code is None:
            self._ask(member)
        elif member.code > _KILLED and member.worker is not None and self.restarts > 0:
            self._restart(member)
        elif member.code > _KILLED and member.worker is None:
            self.lost = member.who
        elif member.code != 0 and not self._is_shard_lost():
            self.failure = Failure(member.who, member.code, member.last_lines)

    def _restart(self, member: _Member) -> None:
        """Let Ray start a worker again, which was killed."""
        self._say(f"{member.who} was killed by signal {(member.code or 0) - _KILLED}: it is started again")
        self.restarts -= 1
        member.code = None
        if member.worker is not None:
            self.codes[member.worker] = None
        with suppress(self._ray.exceptions.RayError):
            self._ray.get(member.actor.close.remote(), timeout=_ANSWER_S)
        self._ray.kill(member.actor, no_restart=False)
        self._ask(member)

    def _is_shard_lost(self) -> bool:
        """Whether a worker may have failed because a shard is gone."""
        for member in self._members:
            if member.worker is not None or member.code is not None:
                continue
            try:
                report = self._ray.get(member.actor.poll.remote(0.0), timeout=_ANSWER_S)
            except self._ray.exceptions.RayError:
                self.lost = member.who
                continue
            self._take(member, report)
            if report.code is not None and report.code > _KILLED:
                self.lost = member.who
        return self.lost is not None

    def _take(self, member: _Member, report: Report) -> None:
        """Show and log what an actor reports."""
        for line, to_stderr in report.lines:
            with suppress(OSError, ValueError):  # nobody reads our output any more
                self._display.print(member.prefix + line, to_stderr=to_stderr)
        for event in report.events:
            self._board.add(event)
        if report.events and self._run.folder is not None:
            log = self._run.folder / f"events-{member.who.replace(' ', '-')}.jsonl"
            with suppress(OSError), log.open("ab") as file:
                file.writelines(msgspec.json.encode(event) + b"\n" for event in report.events)
        member.code, member.last_lines = report.code, report.last_lines
        if member.worker is not None:
            self.codes[member.worker] = report.code
