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
from typing import TYPE_CHECKING, Annotated

import typer

from shoestring.cli.lazy import settings
from shoestring.errors import UsageError

if TYPE_CHECKING:
    from shoestring.server.serve import Service

_GRACE_S = 10.0  # to finish a file of a checkpoint when the parent is gone

_EPILOG = """\
[bold]Examples[/bold]
  shoestring serve --run digits
  shoestring serve --run digits --shard 1 --shards 2 --address tcp://192.168.1.5:5555 --keys keys
"""


@settings(epilog=_EPILOG)
def serve(
    run: Annotated[str, typer.Option(help="The run's name; workers of another run are refused.")],
    address: Annotated[
        str, typer.Option(help="Where to listen. Port 0 picks a free one.")
    ] = "tcp://127.0.0.1:0",
    shard: Annotated[int, typer.Option(min=0, help="Which shard of the run this is, from 0.")] = 0,
    shards: Annotated[int, typer.Option(min=1, help="How many shards the run has.")] = 1,
    keys: Annotated[
        Path | None,
        typer.Option(envvar="SHOESTRING_KEYS", help="Folder of keys; needed beyond this machine."),
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="How many parts are updated at once.")] = 1,
    checkpoint: Annotated[Path | None, typer.Option(help="Folder to write checkpoints to.")] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Go on from this checkpoint, or the newest below.")
    ] = None,
    folder: Annotated[Path | None, typer.Option(help="Where the event log goes.")] = None,
    lease: Annotated[
        float, typer.Option(min=1.0, help="Seconds of silence after which a worker is taken out.")
    ] = 20.0,
    stay: Annotated[bool, typer.Option("--stay", help="Stay when all workers have left.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print where it listens as JSON.")] = False,
    lifeline: Annotated[int | None, typer.Option(hidden=True)] = None,
    linger: Annotated[bool, typer.Option("--linger", hidden=True)] = False,
) -> None:
    """Hold a part of the model's parameters and serve them to workers.

    Prints the address it listens on once it is ready. It ends when every worker has come and left.
    """
    if shard >= shards:
        raise UsageError(f"there is no shard {shard} of {shards}", hint="shards are counted from 0")
    stopper = _Stopper()
    signal.signal(signal.SIGTERM, stopper.on_signal)
    signal.signal(signal.SIGINT, stopper.on_signal)
    if lifeline is not None:
        from shoestring.launch.lifeline import watch

        watch(lifeline, lambda: stopper.on_orphaned(linger))

    import zmq

    from shoestring.checkpoint.resume import find_snapshot
    from shoestring.checkpoint.shard import ShardWriter
    from shoestring.observe.events import EventLog
    from shoestring.server.saving import restorer
    from shoestring.server.serve import Service, listen
    from shoestring.server.shard import Shard
    from shoestring.server.warmup import warm_up
    from shoestring.wire.keys import keys_from_folder

    own = Shard(shard, shards, run, lease_s=lease, is_sharing=address.startswith("ipc:"))
    if resume is not None:
        own.restore = restorer(find_snapshot(resume))
    shard_keys = None if keys is None else keys_from_folder(keys, "shard")
    warm_up(threads)
    listener = listen(zmq.Context.instance(), address, keys=shard_keys)
    with EventLog(folder, f"shard-{shard}") as log:
        writer = ShardWriter(checkpoint, shard) if checkpoint is not None else None
        service = Service(own, listener, threads=threads, writer=writer, report=log.write)
        stopper.attend(service)
        _announce(listener.address, shard, shards, run, as_json)
        try:
            service.run(until_all_left=not stay)
        finally:
            listener.close()
    if stopper.interrupted:
        raise KeyboardInterrupt


class _Stopper:
    """Ends the service when a signal says so or the parent is gone, at whatever moment."""

    def __init__(self) -> None:
        self.interrupted = False
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
        overdue = threading.Timer(_GRACE_S, os._exit, (1,))  # something hangs, and nobody is left to wait
        overdue.daemon = True
        overdue.start()


def _announce(address: str, shard: int, shards: int, run: str, as_json: bool) -> None:
    facts = {"address": address, "shard": shard, "shards": shards, "run": run, "pid": os.getpid()}
    with suppress(BrokenPipeError):  # whoever asked is gone; the lifeline says so too
        typer.echo(json.dumps(facts) if as_json else address)
    if not as_json:
        typer.echo(f"shard {shard} of {shards} of run `{run}` is ready; Ctrl-C stops it", err=True)
