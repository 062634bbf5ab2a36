"""The keys of one start of a run, made by whoever starts it and handed out to each process.

A shard gets the shards' secret key and everyone's public keys; a worker its own secret key and
the shards' public one. They are key files as `shoestring keys` writes them, held in memory.
"""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from shoestring.wire import keys


@dataclass(frozen=True)
class RunKeys:
    """Key files by name. Never shown."""

    files: Mapping[str, bytes] = field(repr=False)

    @classmethod
    def make(cls, workers: int) -> "RunKeys":
        """Make new keys for the shards and for each worker."""
        with tempfile.TemporaryDirectory(prefix="shoestring-") as name:
            folder = Path(name)
            for who in (keys.SHARD, *(f"worker-{worker}" for worker in range(workers))):
                keys.new(who, folder)
            return cls({path.name: path.read_bytes() for path in folder.iterdir()})

    def for_shard(self) -> dict[str, bytes]:
        """What a shard needs."""
        own = keys.secret_file(keys.SHARD, Path()).name
        return {name: file for name, file in self.files.items() if name == own or name.endswith(".public")}

    def for_worker(self, worker: int) -> dict[str, bytes]:
        """What one worker needs."""
        own = keys.secret_file(f"worker-{worker}", Path()).name
        return {name: self.files[name] for name in (own, keys.public_file(keys.SHARD, Path()).name)}
