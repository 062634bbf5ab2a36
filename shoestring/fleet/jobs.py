"""A job: what is to be trained, read from a TOML or a Python file.

A TOML file is one job, or several as `[[job]]` tables; a Python file defines `job` or `jobs`.
Paths are relative to the file. `{batch}` in an argument becomes the batch size, which is in
the variable `SHOESTRING_BATCH` too.

The length of a job is given as `steps`, or as `epochs` of `samples`: then the steps follow from
the batch size. A job keeps the batch size it was first started with.
"""

import hashlib
import math
import re
import runpy
import tomllib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from shoestring.errors import FleetError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_FILE_BYTES = 1 << 20
_CODE_FILES, _CODE_BYTES = 2000, 1 << 26
_HINT = "see docs/fleet.md for what a job file may say"


@dataclass(frozen=True)
class Job:
    """One training, and what the fleet may do with it.

    `batches` are the sizes it may train with, the preferred one first. `kinds` are the
    devices it may use, all by default; `devices` it needs at once. `every` is the steps
    between checkpoints, 0: chosen from the step time. `deadline_s` counts from its adding.
    """

    name: str
    script: str
    arguments: tuple[str, ...] = ()
    batches: tuple[int, ...] = (32,)
    steps: int = 0
    epochs: float = 0.0
    samples: int = 0  # of an epoch
    priority: float = 1.0
    deadline_s: float | None = None
    devices: int = 1
    kinds: tuple[str, ...] = ()
    every: int = 0

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise FleetError(
                f"a job cannot be called `{self.name}`",
                hint="use letters, digits, `-`, `_` and `.`, at most 64",
            )
        by_steps, by_epochs = self.steps > 0, self.epochs > 0 and self.samples > 0
        self._demand(
            by_steps != by_epochs and self.steps >= 0,
            "must say how long it is in one way: `steps`, or `epochs` and the `samples` of one",
        )
        self._demand(
            bool(self.batches) and all(0 < batch <= 1 << 24 for batch in self.batches),
            f"has batch sizes {list(self.batches)}, expected at least one above 0",
        )
        self._demand(1 <= self.devices <= 1024, f"asks for {self.devices} devices, expected 1 to 1024")
        self._demand(
            math.isfinite(self.priority) and self.priority > 0,
            f"has priority {self.priority}, expected a number above 0",
        )
        self._demand(
            self.deadline_s is None or (math.isfinite(self.deadline_s) and self.deadline_s > 0),
            f"has a deadline of {self.deadline_s} s, expected one above 0",
        )
        self._demand(self.every >= 0, f"has checkpoints every {self.every} steps, expected 0 or more")

    def total_steps(self, batch: int) -> int:
        """The steps of the whole job with this batch size."""
        return self.steps or max(1, math.floor(self.epochs * (self.samples // batch)))

    def command(self, batch: int) -> list[str]:
        """The script and its arguments, for one batch size."""
        return [self.script, *(argument.replace("{batch}", str(batch)) for argument in self.arguments)]

    def key(self) -> str:
        """A hash of the job's code and arguments: what was measured holds while it stays the same.

        All Python files beside the script count as its code: it may import them.
        """
        digest = hashlib.sha256()
        for path in _code_of(Path(self.script)):
            digest.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
        digest.update("\0".join(self.arguments).encode())
        return digest.hexdigest()[:32]

    def to_json(self) -> str:
        """The job as text, which `from_json` reads."""
        return msgspec.json.encode(asdict(self)).decode()

    @classmethod
    def from_json(cls, text: str) -> "Job":
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.MsgspecError as error:
            raise FleetError(
                f"a stored job cannot be read: {error}", hint="remove it with `shoestring fleet rm`"
            ) from None

    def _demand(self, is_so: bool, what: str) -> None:
        if not is_so:
            raise FleetError(f"job `{self.name}` {what}", hint=_HINT)


def read_jobs(path: Path) -> list[Job]:
    """Read the jobs of a file; every script must be there."""
    if not path.is_file():
        raise FleetError(f"there is no job file `{path}`", hint="give a TOML or a Python file")
    jobs = _from_python(path) if path.suffix == ".py" else _from_toml(path)
    jobs = [replace(job, script=str((path.parent / job.script).resolve())) for job in jobs]
    for job in jobs:
        if not Path(job.script).is_file():
            raise FleetError(
                f"job `{job.name}` names a script `{job.script}`, which is not there",
                hint=f"give its path, relative to `{path.parent}`",
            )
    names = [job.name for job in jobs]
    if len(set(names)) < len(names):
        raise FleetError(f"`{path}` has two jobs of one name", hint="give each a `name`")
    return jobs


def _from_toml(path: Path) -> list[Job]:
    try:
        with path.open("rb") as file:
            text = file.read(_FILE_BYTES).decode()
        table = tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise FleetError(f"`{path}` is not TOML: {error}", hint=_HINT) from None
    tables = table.pop("job", None)
    if tables is None:
        return [_from_table({"name": path.stem, **table}, path)]
    if table or not isinstance(tables, list) or not tables:
        raise FleetError(
            f"`{path}` has `[[job]]` tables and other keys: {', '.join(sorted(table))}", hint=_HINT
        )
    return [_from_table(one, path) for one in tables]


def _from_table(table: Any, path: Path) -> Job:
    if isinstance(table, dict) and isinstance(table.get("batches"), int):
        table = {**table, "batches": [table["batches"]]}
    known = set(Job.__dataclass_fields__)
    if isinstance(table, dict) and (unknown := sorted(set(table) - known)):
        raise FleetError(f"`{path}` says `{unknown[0]}`, which a job does not have", hint=_HINT)
    try:
        return msgspec.convert(table, Job)
    except msgspec.ValidationError as error:
        raise FleetError(f"`{path}` is no job: {error}", hint=_HINT) from None


def _from_python(path: Path) -> list[Job]:
    # The user's own file, run as `python FILE` would: it may compute its jobs.
    names = runpy.run_path(str(path))
    found = names.get("jobs", names.get("job"))
    jobs = [found] if isinstance(found, Job) else list(found) if isinstance(found, Iterable) else []
    if not jobs or not all(isinstance(job, Job) for job in jobs):
        raise FleetError(
            f"`{path}` defines no job",
            hint="set `job` to a `shoestring.fleet.jobs.Job`, or `jobs` to a list of them",
        )
    return jobs


def _code_of(script: Path) -> list[Path]:
    try:
        files = sorted(path for path in script.parent.glob("*.py") if path.is_file())
        sizes = sum(path.stat().st_size for path in files)
        if len(files) > _CODE_FILES or sizes > _CODE_BYTES:
            files = [script]  # a folder of anything: the script alone stands for it
        if not script.is_file():
            raise FileNotFoundError(2, "there is no such file")
    except OSError as error:
        raise FleetError(
            f"the script `{script}` cannot be read: {error.strerror}", hint="add the job again"
        ) from None
    return files
