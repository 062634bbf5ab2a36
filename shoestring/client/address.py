"""Where the shards of a run listen: told by the user, by the run's folder or by the environment."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoestring.config import Run
from shoestring.errors import UsageError
from shoestring.observe.events import Tail

_ADDRESS = re.compile(r"(tcp|ipc|inproc)://.+|[^/\s]+:\d{1,5}")
_LOGS = "events-shard-*.jsonl"
_ALONE = (
    "start the script with `shoestring run --workers 1`: one that is started alone has its shard inside; "
    "shards on other hosts are given by their addresses, `tcp://HOST:PORT,tcp://HOST:PORT`"
)


@dataclass(frozen=True)
class Place:
    """Where a run's shards listen, in their order."""

    addresses: tuple[str, ...]
    run: str = ""  # its name, if it is known


def find(run: str | Path | None) -> Place:
    """Find the shards: from addresses with commas between them, a run's folder, or `SHOESTRING_SHARDS`."""
    if run is None:
        here = Run.here()
        if not here.shards:
            raise UsageError(
                "no run is named, and `SHOESTRING_SHARDS` is not set",
                hint="give a run's folder, such as `shoestring-runs/NAME`, or the addresses of its shards",
            )
        return Place(here.shards)
    if isinstance(run, str):
        given = [text.strip() for text in run.split(",") if text.strip()]
        if given and all(_ADDRESS.fullmatch(text) for text in given):
            return Place(tuple(text if "://" in text else f"tcp://{text}" for text in given))
    return _from_folder(Path(run))


def _from_folder(folder: Path) -> Place:
    """Read where the shards of the last run in a folder said that they listen."""
    if not folder.is_dir():
        raise UsageError(
            f"`{folder}` is neither a run's folder nor the addresses of shards",
            hint="give a folder like `shoestring-runs/NAME`, or `tcp://HOST:PORT` of each shard in order",
        )
    last: dict[str, dict[str, Any]] = {}  # by who wrote it
    for event in Tail(folder, _LOGS).poll():
        if event.get("event") in ("listen", "end"):
            last[str(event.get("who"))] = event
    said = [event for event in last.values() if event["event"] == "listen"]
    if last and not said:
        raise UsageError(
            f"the run in `{folder}` has ended",
            hint="take its model from a checkpoint: `shoestring export`",
        )
    newest = max(said, key=lambda event: float(event.get("time", 0.0)), default={})
    run, shards = str(newest.get("run", "")), newest.get("shards", 0)
    found = {event.get("shard"): event.get("address") for event in said if event.get("run") == run}
    addresses = [found.get(shard) for shard in range(shards)] if isinstance(shards, int) else []
    if not addresses or not all(isinstance(address, str) for address in addresses):
        raise UsageError(f"in `{folder}` {len(found)} of {shards} shards say where they listen", hint=_ALONE)
    return Place(tuple(str(address) for address in addresses), run)
