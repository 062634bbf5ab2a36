"""This process's place in a run, from `init` until it ends.

A run of its own has one worker and one shard, the shard in a thread of this process: the
same code, policies and checkpoints as with many hosts, and no service to start.
"""

import atexit
import contextlib
import secrets
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import zmq

from shoestring.checkpoint.shard import ShardWriter
from shoestring.checkpoint.snapshot import Snapshot
from shoestring.checkpoint.worker import WorkerState
from shoestring.config import Run
from shoestring.errors import UsageError
from shoestring.observe import trackers
from shoestring.observe.events import EventLog
from shoestring.observe.tracking import Tracking
from shoestring.server.saving import restorer
from shoestring.server.serve import QUEUED, Service, listen
from shoestring.server.shard import Shard
from shoestring.wire import frames
from shoestring.wire.identity import TRAINED_LIMIT, identity_of
from shoestring.wire.keys import keys_from_folder
from shoestring.wire.link import connect
from shoestring.worker.rounds.sharing import Sharing
from shoestring.worker.rounds.witness import Watch

Sockets = list[tuple[str, "zmq.Socket[bytes]"]]


class Whereabouts(Protocol):
    """Knows how far training has come in its data."""

    def where(self) -> Any: ...


@dataclass
class Session:
    """What `init` found out, and what has to be closed at the end."""

    run: Run
    life: str  # differs from process to process
    log: EventLog
    closers: list[Callable[[], None]] = field(default_factory=list)
    forwards: int = 0  # training passes through the model so far
    models: int = 0  # how many were wrapped
    reporter: Any = None
    watch: Watch | None = None  # of the first model, which is shown batches
    position_source: "Whereabouts | None" = None
    places: list["Whereabouts"] = field(default_factory=list)  # of the loaders that `split` made
    stateful: list[Any] = field(default_factory=list)  # what `keep` was given
    resumed: WorkerState = field(default_factory=WorkerState)  # what a resume found

    def __post_init__(self) -> None:
        self.sharing = Sharing(self.run.worker, self.run.workers, lambda: self.forwards)
        self._tracking: Tracking | None = None  # until it is taken
        self._is_tracked = False
        self._own_shard = ""

    def next_model(self) -> int:
        """The number of one more model that is wrapped: from 0, in the same order on every worker."""
        if self.models >= TRAINED_LIMIT:
            raise UsageError(
                f"{self.models} models were wrapped in this run already",
                hint="wrap each model once, before the loop that trains it",
            )
        self.models += 1
        return self.models - 1

    def report_to(self, make: Callable[..., Any], *about: Any) -> Any:
        """The reporter of this process: made for its first model, which it reports on."""
        if self.reporter is None:
            self.reporter = make(self, *about)
            self.closers.append(self.reporter.close)
        return self.reporter

    def position(self) -> tuple[int, int]:
        """The epoch and the batch in it that training has come to."""
        if self.position_source is None:
            return (0, 0)
        where = self.position_source.where()
        return (where.epoch, where.batch)

    def all_places(self) -> list[tuple[int, int]]:
        """The same for each loader that `split` made."""
        found = [place.where() for place in self.places]
        return [(where.epoch, where.batch) for where in found]

    def explain(self, codec: str, why: str) -> None:
        """Note why a codec was chosen."""
        self.log.write("codec", worker=self.run.worker, spec=codec, why=why)

    def take_tracking(self) -> Tracking | None:
        """What tells the run's tracker, for who asks first; only the first worker has it."""
        taken, self._tracking = self._tracking, None
        return taken

    def connect(self, model: int = 0) -> Sockets:
        """Open a socket to every shard for a model; for a run of its own, start its shard first.

        The run's tracker is opened too, where it may fail without others waiting for this worker.
        """
        if self.run.tracker and self.run.worker == 0 and not self._is_tracked:
            self._is_tracked = True
            self._tracking = self._open_tracking()
        context: zmq.SyncContext = zmq.Context.instance()
        addresses = self.run.shards
        if not addresses:
            self._own_shard = self._own_shard or self._start_shard(context)
            addresses = (self._own_shard,)
        identity = identity_of(self.run.worker, self.life, model)
        keys = None
        if self.run.keys is not None and not self.run.is_alone:
            keys = keys_from_folder(self.run.keys, "worker", f"worker-{self.run.worker}")
        limit = frames.PAYLOAD_LIMIT
        return [
            (
                address,
                connect(
                    context,
                    address,
                    keys=keys,
                    identity=identity,
                    max_message_bytes=limit,
                    max_queued=QUEUED,
                ),
            )
            for address in addresses
        ]

    def close(self) -> None:
        """Close what was opened, the last first. May be called again."""
        while self.closers:
            with contextlib.suppress(Exception):
                self.closers.pop()()
        self.log.close()

    def notice(self, text: str) -> None:
        """Tell the user something, on stderr and in the event log."""
        self.log.write("warn", text=text, is_printed=True)
        print(f"shoestring: worker {self.run.worker}: {text}", file=sys.stderr, flush=True)

    def _open_tracking(self) -> Tracking:
        tracker = trackers.open_tracker(self.run.tracker, self.run)
        # The library may have something to do at the end of the process: this run ends before.
        atexit.register(end)
        tracking = Tracking(tracker, self.run.folder, self.notice)
        self.closers.append(tracking.close)
        return tracking

    def _start_shard(self, context: zmq.SyncContext) -> str:
        address = f"inproc://shoestring-{id(self)}-{self.life}"
        listener = listen(context, address)
        shard = Shard(0, 1, self.run.name, lease_s=self.run.lease_s)
        if self.run.resume is not None:
            shard.restore = restorer(Snapshot(self.run.resume))
        writer = ShardWriter(self.run.checkpoint, 0) if self.run.checkpoint is not None else None
        service = Service(shard, listener, writer=writer)
        thread = threading.Thread(target=service.run, name="shard", daemon=True)
        thread.start()

        def stop() -> None:
            service.stop()
            thread.join(self.run.save_timeout_s)
            listener.close()

        self.closers.append(stop)
        return listener.address


_session: Session | None = None


def begin(run: Run) -> Session:
    """Make this process a worker of a run; a second call replaces the first."""
    global _session
    end()
    if run.tracker and run.worker == 0:
        trackers.check(run.tracker)  # before others wait for this worker
    log = EventLog(run.folder, f"worker-{run.worker}")
    _session = Session(run, secrets.token_hex(8), log)
    log.write("init", worker=run.worker, workers=run.workers)
    return _session


# Joins the run when the session is first needed: `launch` sets it, which this room does not know.
starter: Callable[[], Any] | None = None


def found() -> Session | None:
    """The session of this process, if it is in a run."""
    return _session


def current() -> Session:
    """The session of this process, which joins its run now if it has not yet."""
    if _session is None and starter is not None:
        starter()
    if _session is None:
        raise UsageError(
            "this process is in no run yet", hint="call `shoestring.init()` before `shoestring.wrap`"
        )
    return _session


def end() -> None:
    """Leave the run, if there is one."""
    global _session
    if _session is not None:
        _session.close()
        _session = None


atexit.register(end)
