"""The database of a fleet: jobs with their history, profiles, and the lock of the process that runs them.

One SQLite file in the fleet's folder, in WAL mode: several commands may use it at once, and a
process that is killed leaves it as its last transaction did (a power cut may undo the last
few). A job's state changes in one transaction with the line of its history.

One process runs a fleet: it holds a lock on a file, which the kernel lets go when that
process ends, however it ends. Jobs that it had running are then `stopped`: see `recover`.
"""

import contextlib
import fcntl
import os
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shoestring.errors import FleetError
from shoestring.fleet.jobs import Job

State = Literal["queued", "running", "stopped", "done", "failed"]
OPEN: tuple[State, ...] = ("queued", "running", "stopped")

_BUSY_S = 30.0
_VERSION = 1
_TABLES = """
create table if not exists jobs (
    name text primary key, place integer not null, spec text not null, key text not null,
    added_at real not null, state text not null, batch integer, steps integer not null default 0,
    device text not null default '', note text not null default '', ends_at real,
    is_unwanted integer not null default 0
) strict;
create table if not exists history (
    id integer primary key, job text not null, at real not null, state text not null,
    device text not null, batch integer, steps integer not null, note text not null
) strict;
create table if not exists profiles (
    key text not null, kind text not null, data text not null, at real not null,
    primary key (key, kind)
) strict;
create table if not exists pairs (
    kind text not null, a text not null, b text not null, factor real not null, seen real not null,
    primary key (kind, a, b)
) strict;
"""


@dataclass(frozen=True)
class Entry:
    """A job and where it stands. `note` says why; times are the wall clock's."""

    job: Job
    key: str  # of its code when it was added
    added_at: float
    state: State
    batch: int | None
    steps: int
    device: str
    note: str
    ends_at: float | None
    is_unwanted: bool


@dataclass(frozen=True)
class Change:
    """One line of a job's history."""

    job: str
    at: float
    state: State
    device: str
    batch: int | None
    steps: int
    note: str


def default_folder() -> Path:
    """The folder of a fleet: `SHOESTRING_FLEET`, or `fleet` in the user's state folder."""
    if given := os.environ.get("SHOESTRING_FLEET"):
        return Path(given)
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(home) / "shoestring" / "fleet"


class Database:
    """The fleet of one folder. Use it in one thread; close it, or use it in a `with`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(self.folder / "fleet.db", timeout=_BUSY_S, isolation_level=None)
            self._db.execute("pragma journal_mode=wal")
            self._db.execute("pragma synchronous=normal")
            version = self._db.execute("pragma user_version").fetchone()[0]
            if version not in (0, _VERSION):
                raise FleetError(
                    f"`{self.folder}` is a fleet of version {version}, this is version {_VERSION}",
                    hint="use another folder with `--fleet`, or the release that made this one",
                )
            with self._change():
                for statement in _TABLES.split(";"):
                    self._db.execute(statement)
                self._db.execute(f"pragma user_version={_VERSION}")
        except (OSError, sqlite3.Error) as error:
            raise FleetError(
                f"the fleet in `{self.folder}` cannot be opened: {error}",
                hint="give another folder with `--fleet`",
            ) from None

    def close(self) -> None:
        self._db.close()

    def __enter__(self) -> "Database":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def job_folder(self, name: str) -> Path:
        """The folder of a job's output, event logs and checkpoints."""
        return self.folder / "jobs" / name

    def add(self, jobs: list[Job]) -> None:
        """Put jobs in the queue, all of them or none."""
        with self._change():
            for job in jobs:
                if self._db.execute("select 1 from jobs where name = ?", (job.name,)).fetchone():
                    raise FleetError(
                        f"there is a job `{job.name}` already",
                        hint=f"give it another name, or remove the old one: `shoestring fleet rm {job.name}`",
                    )
                place = self._db.execute("select coalesce(max(place), 0) + 1 from jobs").fetchone()[0]
                self._db.execute(
                    "insert into jobs (name, place, spec, key, added_at, state) values (?, ?, ?, ?, ?, ?)",
                    (job.name, place, job.to_json(), job.key(), time.time(), "queued"),
                )
                self._note(job.name, "added")

    def entries(self) -> list[Entry]:
        """List all jobs in the order they were added."""
        rows = self._db.execute(
            "select spec, key, added_at, state, batch, steps, device, note, ends_at, is_unwanted "
            "from jobs order by place"
        )
        return [
            Entry(
                Job.from_json(spec), key, added_at, state, batch, steps, device, note, ends_at, bool(unwanted)
            )
            for spec, key, added_at, state, batch, steps, device, note, ends_at, unwanted in rows
        ]

    def entry(self, name: str) -> Entry:
        """Find a job by its name."""
        for entry in self.entries():
            if entry.job.name == name:
                return entry
        raise FleetError(f"there is no job `{name}`", hint="see the jobs with `shoestring fleet ls`")

    def move(
        self, name: str, state: State, *, device: str = "", note: str = "", batch: int | None = None
    ) -> None:
        """Change a job's state; a batch size, once given, stays."""
        with self._change():
            done = self._db.execute(
                "update jobs set state = ?, device = ?, note = ?, ends_at = null, "
                "batch = coalesce(batch, ?) where name = ?",
                (state, device, note, batch, name),
            )
            if done.rowcount:
                self._note(name, note)

    def tell(self, name: str, *, steps: int | None = None, note: str | None = None,
             ends_at: float | None = None) -> None:  # fmt: skip
        """Write down the steps of a job, the reason for its state, and its expected end."""
        self._db.execute(
            "update jobs set steps = max(steps, coalesce(?, steps)), note = coalesce(?, note), ends_at = ? "
            "where name = ?",
            (steps, note, ends_at, name),
        )

    def unwant(self, name: str) -> None:
        """Ask whoever runs the fleet to stop a job and forget it."""
        self._db.execute("update jobs set is_unwanted = 1 where name = ?", (name,))

    def forget(self, name: str) -> None:
        """Remove a job and its history; its files stay for the caller to remove."""
        with self._change():
            self._db.execute("delete from jobs where name = ?", (name,))
            self._db.execute("delete from history where job = ?", (name,))

    def history(self, name: str | None = None) -> list[Change]:
        """List what happened, to one job or to all, in order."""
        rows = self._db.execute(
            "select job, at, state, device, batch, steps, note from history "
            "where ? is null or job = ? order by id",
            (name, name),
        )
        return [Change(*row) for row in rows]

    def save_profile(self, key: str, kind: str, data: str) -> None:
        """Save the profile of a job's code on a kind of device."""
        self._db.execute(
            "insert or replace into profiles values (?, ?, ?, ?)", (key, kind, data, time.time())
        )

    def profiles(self, key: str) -> dict[str, str]:
        """The saved profiles of a job's code, by kind of device."""
        return dict(self._db.execute("select kind, data from profiles where key = ?", (key,)).fetchall())

    def save_pair(self, kind: str, a: str, b: str, factor: float, seen: float) -> None:
        """Save the speed of `a` beside `b` as a part of its speed alone, and for how long it was seen."""
        self._db.execute("insert or replace into pairs values (?, ?, ?, ?, ?)", (kind, a, b, factor, seen))

    def pairs(self) -> dict[tuple[str, str, str], tuple[float, float]]:
        """The saved speeds of pairs: `(kind, a, b)` gives the factor and the seconds."""
        rows = self._db.execute("select kind, a, b, factor, seen from pairs")
        return {(kind, a, b): (factor, seen) for kind, a, b, factor, seen in rows}

    def is_run(self) -> bool:
        """Say whether a process runs this fleet now."""
        try:
            with self.hold():
                return False
        except FleetError:
            return True

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Be the one process that runs this fleet."""
        with (self.folder / "run.lock").open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise FleetError(
                    f"another process runs the fleet in `{self.folder}`",
                    hint="stop it, or use another folder with `--fleet`",
                ) from None
            yield

    def recover(self) -> list[str]:
        """Mark jobs as stopped that a process which ended had running; return their names. Hold the lock."""
        lost = [entry.job.name for entry in self.entries() if entry.state == "running"]
        for name in lost:
            self.move(name, "stopped", note="the process that ran the fleet ended")
        return lost

    def _note(self, name: str, note: str) -> None:
        self._db.execute(
            "insert into history (job, at, state, device, batch, steps, note) "
            "select name, ?, state, device, batch, steps, ? from jobs where name = ?",
            (time.time(), note, name),
        )

    @contextlib.contextmanager
    def _change(self) -> Iterator[None]:
        self._db.execute("begin immediate")
        try:
            yield
        except BaseException:
            self._db.execute("rollback")
            raise
        self._db.execute("commit")
