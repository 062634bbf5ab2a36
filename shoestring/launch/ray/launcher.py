"""Run a script as workers on a Ray cluster, with a shard on each of their nodes.

Ray places the processes, starts them on their nodes and tells when one is gone; what they
say to each other goes over their own connections, as everywhere else. A seat (`rayseat.py`)
is an actor that holds one process; the driver, here, follows all seats.

What happens when something is lost:

- A worker that was killed, or whose actor is gone, is started again by Ray, elsewhere if its
  node is lost, and joins the run as a new incarnation: with its data, schedule and buffers from
  the newest checkpoint where there is one, with the parameters of the shards in any case.
- A shard that is gone takes its part of the parameters with it. The whole crew is stopped and
  started again from the newest checkpoint, on the nodes that are there then: fewer, or more.
  With a named codec the rounds since the checkpoint come out as they were, bit for bit.
- A script that fails by itself ends the run with its exit code, as on one machine.

Promises: when `run_ray` returns or raises, nothing that it started on the cluster is left; when
the driver is killed Ray ends its actors, and they their processes. Between nodes there are always
keys, made anew for each start.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from shoestring.checkpoint.resume import AUTO, begin
from shoestring.config import Run
from shoestring.errors import JoinError
from shoestring.launch.local import Failure, Outcome
from shoestring.launch.ray.cluster import Cluster, open_cluster, parse_address
from shoestring.launch.ray.keys import RunKeys
from shoestring.launch.ray.nodes import Places, place
from shoestring.launch.ray.process import Order, RaySeat, Report, tcp_address
from shoestring.launch.shard import READY_S, ShardOrder
from shoestring.launch.signals import signals_as_exceptions, signals_ignored
from shoestring.observe.progress import Board, Display

_POLL_S = 1.0  # how long a seat holds a question until it has something to say
_LOOK_S = 0.25
_SILENT_S = 60.0  # after which a seat that does not answer counts as lost
_GRACE_S = 5.0
_SAVING_S = 60.0  # for shards to end after a run that went well: a checkpoint may be half written
_KILLED = 128  # exit codes above it: ended by a signal


@dataclass(frozen=True)
class Wishes:
    """What a run asks of a cluster. `None`: what fits."""

    shards: int | None = None  # one for each node, at most one for each worker
    threads: int | None = None  # of a worker
    cpus: float | None = None  # of a worker, as Ray counts them
    gpus: float | None = None  # of a worker; 0.5: two share one
    restarts: int = 3  # of workers or the whole crew, in all
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    folder: str = ""  # that workers start in, where a node has it
    working_dir: str = ""  # to be copied to the nodes, to start in instead


def run_on_ray(
    on: str,
    command: list[str],
    run: Run,
    wishes: Wishes,
    *,
    allow_open: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> Outcome:
    """Run `command` on the cluster that `on` names (`ray://HOST:PORT`), and disconnect."""
    cluster = open_cluster(parse_address(on), allow_open=allow_open, working_dir=wishes.working_dir)
    try:
        return run_ray(command, run, cluster, wishes, say)
    finally:
        cluster.close()


def run_ray(
    command: list[str], run: Run, cluster: Cluster, wishes: Wishes, say: Callable[[str], None]
) -> Outcome:
    """Run `command` once for each of the run's workers on a cluster, and wait for all of them."""
    began = time.monotonic()
    outcome = Outcome(exit_codes=[None] * run.workers)
    board = Board()
    display = Display(board)
    left = wishes.restarts
    with signals_as_exceptions():
        try:
            while True:
                crew = _Crew(command, run, cluster, replace(wishes, restarts=left), board, display, say)
                try:
                    crew.start()
                    crew.wait()
                finally:
                    with signals_ignored():
                        crew.stop()
                left = crew.restarts - 1
                if crew.lost is None or left < 0:
                    break
                say(f"{crew.lost} is gone: starting all workers and shards again")
                # What is left of this crew must not change the folder from now on.
                run = replace(run, resume=begin(AUTO, run.checkpoint, say) or run.resume)
        finally:
            display.close()
    outcome.exit_codes = crew.codes
    outcome.failure = crew.failure
    if crew.lost is not None:
        outcome.failure = Failure(crew.lost, 1, (f"lost, and {wishes.restarts} restarts were used up",))
    outcome.seconds = time.monotonic() - began
    return outcome


@dataclass
class _Member:
    """A seat as the driver sees it."""

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


class _Crew:
    """All seats of a run, from one start to the next."""

    def __init__(
        self,
        command: list[str],
        run: Run,
        cluster: Cluster,
        wishes: Wishes,
        board: Board,
        display: Display,
        say: Callable[[str], None],
    ) -> None:
        self.failure: Failure | None = None
        self.lost: str | None = None  # who was lost, so that all must start again
        self.codes: list[int | None] = [None] * run.workers
        self.restarts = wishes.restarts
        self._command = tuple(command)
        self._run = run
        self._ray = cluster.ray
        self._cluster = cluster
        self._wishes = wishes
        self._board = board
        self._display = display
        self._say = say
        self._places: Places | None = None
        self._members: list[_Member] = []
        self._asked: dict[Any, _Member] = {}

    def start(self) -> None:
        """Start the shards, and when they listen the workers."""
        wishes, run = self._wishes, self._run
        self._places = places = place(
            self._cluster, run.workers, wishes.shards, cpus=wishes.cpus, gpus=wishes.gpus
        )
        shards = len(places.shards)
        is_together = len(places.nodes) == 1
        cards = None if is_together else RunKeys.make(run.workers)
        self._say(f"{run.workers} workers and {shards} shards on {len(places.nodes)} Ray nodes")
        seats_on = Counter(node.id for node in places.workers)
        for index, node in enumerate(places.shards):
            told = ShardOrder(
                index,
                shards,
                run.name,
                "" if is_together else tcp_address(node.address),
                threads=max(1, int(node.cpus) // (1 + seats_on[node.id])),
                checkpoint=run.checkpoint,
                resume=run.resume,
            )
            own = cards.for_shard() if cards else {}
            actor = self._seat(places.shard_options(index), Order(run, shard=told, keys=own))
            self._members.append(_Member(f"shard {index}", actor, node.id))
        addresses = self._addresses()
        if self.lost is not None:
            return
        run = replace(run, shards=addresses)
        seen: Counter[str] = Counter()
        for worker, node in enumerate(places.workers):
            # A worker that was given GPUs sees no others: its first one is its own.
            local = 0 if places.gpus else seen[node.id]
            seen[node.id] += 1
            order = Order(
                replace(run, worker=worker, local=local),
                self._command,
                keys=cards.for_worker(worker) if cards else {},
                environment=wishes.environment,
                threads=wishes.threads or max(1, int(node.cpus) // seats_on[node.id]),
                folder=wishes.folder,
            )
            options = places.worker_options(worker) | {"max_restarts": self.restarts, "max_task_retries": -1}
            self._members.append(_Member(f"worker {worker}", self._seat(options, order), node.id, worker))

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
                if now - member.asked_at > _SILENT_S + _POLL_S:
                    self.lost = member.who
            self._display.refresh()

    def stop(self) -> None:
        """End what is left, wait for it, and give the places back."""
        is_well = self.failure is None and self.lost is None and all(code == 0 for code in self.codes)
        grace_s = _SAVING_S if is_well else _GRACE_S
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
                done, silent = self._ray.wait(list(stops), num_returns=len(stops), timeout=grace_s + _GRACE_S)
                for ref in done:
                    self._say_goodbye(stops[ref], ref)
                for ref in (*done, *silent):
                    self._ray.kill(stops[ref].actor)
        if self._places is not None:
            self._places.close()

    def _say_goodbye(self, member: _Member, stopped: Any) -> None:
        """Take what a seat still has to report, and let it clean up; unless it is gone."""
        with suppress(self._ray.exceptions.RayError):
            self._ray.get(stopped)
            while member.code is None:
                self._take(member, self._ray.get(member.actor.poll.remote(0.0), timeout=_GRACE_S))
            self._ray.get(member.actor.close.remote(), timeout=_GRACE_S)

    def _seat(self, options: dict[str, Any], order: Order) -> Any:
        return self._ray.remote(RaySeat).options(max_concurrency=4, **options).remote(order)

    def _addresses(self) -> tuple[str, ...]:
        """Where the shards listen, once all of them do."""
        asked = [member.actor.address.remote() for member in self._members]
        found = []
        for member, ref in zip(self._members, asked, strict=True):
            try:
                address, message, hint = self._ray.get(ref, timeout=READY_S + _GRACE_S)
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
            self._ray.get(member.actor.close.remote(), timeout=_GRACE_S)
        self._ray.kill(member.actor, no_restart=False)
        self._ask(member)

    def _is_shard_lost(self) -> bool:
        """Whether a worker may have failed because a shard is gone."""
        for member in self._members:
            if member.worker is not None or member.code is not None:
                continue
            try:
                report = self._ray.get(member.actor.poll.remote(0.0), timeout=_GRACE_S)
            except self._ray.exceptions.RayError:
                self.lost = member.who
                continue
            self._take(member, report)
            if report.code is not None and report.code > _KILLED:
                self.lost = member.who
        return self.lost is not None

    def _take(self, member: _Member, report: Report) -> None:
        """Show and keep what a seat reports."""
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
