"""What a process needs to know about the run it belongs to.

Launchers write a `Run` into the environment of the processes they start; `Run.here` reads
it back. A process that finds none is a run of its own: one worker, no other host.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shoestring.errors import UsageError

_PREFIX = "SHOESTRING_"


@dataclass(frozen=True)
class Run:
    """One worker's place in a run, and the run's settings."""

    name: str = "alone"
    worker: int = 0
    incarnation: int = 0  # which start of this worker it is, as its launcher counts; 0: not counted
    workers: int = 1
    local: int = 0  # which of its host's workers: the device to use, for example
    shards: tuple[str, ...] = ()  # addresses, in order; none: a shard inside this process
    folder: Path | None = None  # where event logs go
    keys: Path | None = None
    checkpoint: Path | None = None
    every: int = 0  # rounds between checkpoints, 0: none
    keep: int = 3  # checkpoints to keep
    resume: Path | None = None  # the checkpoint to go on from
    codec: str = ""
    policy: str = ""
    timeout_s: float = 60.0  # how long a shard may be silent

    @property
    def is_alone(self) -> bool:
        return not self.shards

    def to_environment(self) -> dict[str, str]:
        """The variables by which `here` gives this run back."""
        values = {
            "RUN": self.name,
            "WORKER": str(self.worker),
            "INCARNATION": str(self.incarnation),
            "WORKERS": str(self.workers),
            "LOCAL": str(self.local),
            "SHARDS": ",".join(self.shards),
            "FOLDER": str(self.folder or ""),
            "KEYS": str(self.keys or ""),
            "CHECKPOINT": str(self.checkpoint or ""),
            "EVERY": str(self.every),
            "KEEP": str(self.keep),
            "RESUME": str(self.resume or ""),
            "CODEC": self.codec,
            "POLICY": self.policy,
            "TIMEOUT_S": repr(self.timeout_s),
        }
        return {_PREFIX + name: value for name, value in values.items()}

    @classmethod
    def here(cls, environment: Mapping[str, str] = os.environ) -> "Run":
        """Read the run this process belongs to from its environment."""

        def text(name: str, default: str = "") -> str:
            return environment.get(_PREFIX + name, default)

        def path(name: str) -> Path | None:
            return Path(text(name)) if text(name) else None

        try:
            run = cls(
                name=text("RUN", "alone"),
                worker=int(text("WORKER", "0")),
                incarnation=int(text("INCARNATION", "0")),
                workers=int(text("WORKERS", "1")),
                local=int(text("LOCAL", "0")),
                shards=tuple(part for part in text("SHARDS").split(",") if part),
                folder=path("FOLDER"),
                keys=path("KEYS"),
                checkpoint=path("CHECKPOINT"),
                every=int(text("EVERY", "0")),
                keep=int(text("KEEP", "3")),
                resume=path("RESUME"),
                codec=text("CODEC"),
                policy=text("POLICY"),
                timeout_s=float(text("TIMEOUT_S", "60")),
            )
        except ValueError as error:
            raise UsageError(
                f"a `{_PREFIX}*` variable of the environment is not a number: {error}",
                hint="start the script with `shoestring run`, or unset these variables",
            ) from None
        if not 0 <= run.worker < run.workers or (run.workers > 1 and not run.shards):
            raise UsageError(
                f"the environment says worker {run.worker} of {run.workers}, with {len(run.shards)} shards",
                hint="start the script with `shoestring run`, or unset the `SHOESTRING_*` variables",
            )
        return run
