"""`shoestring serve`: be one shard of a run, until all its workers have come and left.

Ends cleanly on SIGTERM and Ctrl-C: what was taken into a checkpoint is written first.
"""

import json
import os
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoestring.cli.lazy import settings
from shoestring.cli.options import given, with_settings
from shoestring.config import Run, gather, of, options
from shoestring.errors import UsageError

if TYPE_CHECKING:
    from shoestring.checkpoint.snapshot import Snapshot
    from shoestring.server.serve import Service

_EPILOG = """\
[bold]Examples[/bold]
  shoestring serve --run digits
  shoestring serve --run digits --shard 1 --shards 2 --address tcp://192.168.1.5:5555 --keys keys
"""


@settings(epilog=_EPILOG)
@with_settings(one for one in options() if one.about.is_for_shards)
def serve(
    *,
    run: Annotated[str, typer.Option(help="The run's name; workers of another run are refused.")],
    address: Annotated[
        str, typer.Option(help="Where to listen. Port 0 picks a free one.")
    ] = "tcp://127.0.0.1:0",
    shard: Annotated[int, typer.Option(min=0, help="Which shard of the run this is, from 0.")] = 0,
    shards: Annotated[int, typer.Option(min=1, help="How many shards the run has.")] = 1,
    threads: Annotated[int, typer.Option(min=1, help="How many parts are updated at once.")] = 1,
    stay: Annotated[bool, typer.Option("--stay", help="Stay when all workers have left.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print where it listens as JSON.")] = False,
    lifeline: Annotated[int | None, typer.Option(hidden=True)] = None,
    linger: Annotated[bool, typer.Option("--linger", hidden=True)] = False,
    **named: Any,
) -> None:
    """Hold a part of the model's parameters and serve them to workers.

    Prints the address it listens on once it is ready. It ends when every worker has come and left.
    """
    if shard >= shards:
        raise UsageError(f"there is no shard {shard} of {shards}", hint="shards are counted from 0")
    told = Run(**of(Run, gather({**given(named), "name": run})))
    stopper = _Stopper(told.save_timeout_s)
    signal.signal(signal.SIGTERM, stopper.on_signal)
    signal.signal(signal.SIGINT, stopper.on_signal)
    if lifeline is not None:
        from shoestring.launch.lifeline import watch

        watch(lifeline, lambda: stopper.on_orphaned(linger))

    import zmq

    from shoestring.checkpoint.shard import ShardWriter
    from shoestring.codec import warmup
    from shoestring.observe.events import EventLog
    from shoestring.server.saving import restorer
    from shoestring.server.serve import Service, listen
    from shoestring.server.shard import Shard
    from shoestring.wire.keys import keys_from_folder

    own = Shard(shard, shards, run, lease_s=told.lease_s, is_sharing=address.startswith("ipc:"))
    snapshot = _snapshot(told.resume)
    if snapshot is not None:
        own.restore = restorer(snapshot)
    keys = None if told.keys is None else keys_from_folder(told.keys, "shard")
    warmup.tell(lambda text: typer.echo(f"shoestring: shard {shard}: {text}", err=True))
    listener = listen(zmq.Context.instance(), address, keys=keys)
    with EventLog(told.folder, f"shard-{shard}") as log:
        writer = ShardWriter(told.checkpoint, shard) if told.checkpoint is not None else None
        service = Service(own, listener, threads=threads, writer=writer, report=log.write)
        stopper.attend(service)
        log.write("listen", address=listener.address, shard=shard, shards=shards, run=run)
        _announce(listener.address, shard, shards, run, as_json)
        try:
            service.run(until_all_left=not stay)
        finally:
            listener.close()
            log.write("end")
    if stopper.interrupted:
        raise KeyboardInterrupt


def _snapshot(resume: Path | None) -> "Snapshot | None":
    """The checkpoint to go on from. All shards of a run need the same one, so none chooses by itself."""
    from shoestring.checkpoint.resume import AUTO, NO, find_snapshot

    if resume is None or str(resume) == NO:
        return None
    if str(resume) == AUTO:
        raise UsageError(
            "a shard does not choose a checkpoint: the run's others might choose another",
            hint="give `--resume DIR`, the same for all shards and workers",
        )
    return find_snapshot(resume)


class _Stopper:
    """Ends the service when a signal says so or the parent is gone, at whatever moment."""

    def __init__(self, save_timeout_s: float) -> None:
        self.interrupted = False
        self._save_timeout_s = save_timeout_s
        self._service: Service | None = None

    def attend(self, service: "Service") -> None:
        self._service = service

    def on_signal(self, number: int, _frame: object) -> None:
        self.interrupted = number == signal.SIGINT
        if self._service is not None:
            self._service.stop()
        elif self.interrupted:
            raise KeyboardInterrupt
        else:
            sys.exit(0)

    def on_orphaned(self, linger: bool) -> None:
        """Stop, at once or when no worker is left; in a thread of its own."""
        if self._service is None:
            os._exit(1)
        self._service.stop(when_unneeded=linger)
        if linger:
            self._service.ending.wait()
        # Something hangs, and nobody is left to wait.
        overdue = threading.Timer(self._save_timeout_s, os._exit, (1,))
        overdue.daemon = True
        overdue.start()


def _announce(address: str, shard: int, shards: int, run: str, as_json: bool) -> None:
    facts = {"address": address, "shard": shard, "shards": shards, "run": run, "pid": os.getpid()}
    with suppress(BrokenPipeError):  # whoever asked is gone; the lifeline says so too
        typer.echo(json.dumps(facts) if as_json else address)
    if not as_json:
        typer.echo(f"shard {shard} of {shards} of run `{run}` is ready; Ctrl-C stops it", err=True)
