"""The settings of a run, each listed once.

`Run` is what every worker of a run is told, `Launch` what only the launcher needs. A field carries
its default, its limits and its help; from its name follow its option (`--stop-grace-s`), its
environment variable (`SHOESTRING_STOP_GRACE_S`) and its key in a TOML file (`stop_grace_s`). The
command line, the environment of workers, the commands of shards, TOML files and Ray Train's
configuration loop over these fields, so a new setting is one new field here.

Where a setting is given twice, the first of these counts: an argument in Python, the command line,
the environment, the TOML file, the default. A launcher writes the whole `Run` into the environment
of the workers it starts, and `Run.here` reads it back.
"""

import difflib
import math
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from shoestring.errors import UsageError

PREFIX = "SHOESTRING_"
CONFIG_VARIABLE = "SHOESTRING_CONFIG"  # names a TOML file for scripts that torchrun or Slurm start

TIMES = "Time-outs"
ON_RAY = "On Ray"

_LONGEST_S = 1e6
_BOOLEANS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
_KINDS = {str: "a text", int: "a whole number", float: "a number", bool: "true or false", Path: "a path"}


@dataclass(frozen=True)
class About:
    """What a field of `Run` or `Launch` says about itself beside its type and default."""

    help: str
    least: float = 0
    most: float = math.inf
    variable: str = ""  # without the prefix; else the field's name
    is_told: bool = False  # filled in by launchers: neither an option nor a key of a file
    is_for_shards: bool = False  # an option of `shoestring serve`, too
    metavar: str | None = None
    panel: str | None = None  # of the command line's help


def _time(help: str, *, panel: str = TIMES, is_for_shards: bool = False) -> About:
    return About(help, 0.001, _LONGEST_S, is_for_shards=is_for_shards, metavar="SECONDS", panel=panel)


@dataclass(frozen=True)
class Setting:
    """One field of `Run` or `Launch`, as the ways to give it see it."""

    name: str
    kind: type  # str, int, float, bool, Path, or tuple: of texts
    default: Any
    about: About

    @property
    def option(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return PREFIX + (self.about.variable or self.name.upper())

    def parse(self, text: str) -> Any:
        """Read the value from the text of an environment variable."""
        try:
            if self.kind is bool:
                return _BOOLEANS[text.lower()]
            if self.kind is tuple:
                return tuple(part for part in text.split(",") if part)
            return self.check(self.kind(text), self.variable)
        except (ValueError, KeyError):
            raise self._refusal(text, self.variable) from None

    def convert(self, value: Any, label: str) -> Any:
        """Check a value of a TOML file or of Python, and give it the field's type."""
        if self.kind is tuple and isinstance(value, list | tuple):
            if all(isinstance(part, str) for part in value):
                return tuple(value)
        elif self.kind is Path and isinstance(value, str | Path):
            return Path(value)
        elif self.kind is float and isinstance(value, int | float) and not isinstance(value, bool):
            return self.check(float(value), label)
        elif type(value) is self.kind:
            return self.check(value, label)
        raise self._refusal(value, label)

    def check(self, value: Any, label: str) -> Any:
        """Return the value if it is within the limits."""
        if isinstance(value, int | float) and not self.about.least <= value <= self.about.most:
            raise self._refusal(value, label)
        return value

    def text(self, value: Any) -> str:
        """The value as `parse` reads it; empty for `None`."""
        if value is None:
            return ""
        if isinstance(value, bool):
            return "1" if value else "0"
        if isinstance(value, float):
            return repr(value).removesuffix(".0")
        return ",".join(value) if isinstance(value, tuple) else str(value)

    def _refusal(self, value: Any, label: str) -> UsageError:
        expected = "a list of texts" if self.kind is tuple else _KINDS[self.kind]
        if self.kind in (int, float):
            least, most = self.about.least, self.about.most
            expected += f" from {least:g} to {most:g}" if most < math.inf else f" from {least:g}"
        return UsageError(
            f"`{label}` is `{value}`, expected {expected}", hint=f"`{self.name}`: {self.about.help}"
        )


class _Checked:
    """A class of settings whose values are checked when it is made."""

    def __post_init__(self) -> None:
        own: Any = type(self)
        for setting in settings(own):
            setting.check(getattr(self, setting.name), setting.name)


@dataclass(frozen=True)
class Run(_Checked):
    """One worker's place in a run, and the run's settings."""

    name: Annotated[
        str,
        About(
            "The run's name. Default of `shoestring run`: the script's, and the time.",
            variable="RUN",
            metavar="NAME",
        ),
    ] = "alone"
    worker: Annotated[int, About("This worker's number in the run, from 0.", is_told=True)] = 0
    workers: Annotated[
        int, About("How many processes train. Default of `shoestring run`: 2.", 1, 1 << 16)
    ] = 1
    local: Annotated[int, About("Its number on its host, for choosing a device.", is_told=True)] = 0
    shards: Annotated[
        tuple[str, ...],
        About("Addresses of the shards, in order; without any, a shard inside this process.", is_told=True),
    ] = ()
    folder: Annotated[
        Path | None,
        About(
            "Where event logs go. Default of `shoestring run`: shoestring-runs/NAME.",
            is_for_shards=True,
            metavar="DIR",
        ),
    ] = None
    keys: Annotated[
        Path | None, About("Folder of keys; needed beyond this machine.", is_for_shards=True, metavar="DIR")
    ] = None
    checkpoint: Annotated[
        Path | None, About("Folder of the run's checkpoints.", is_for_shards=True, metavar="DIR")
    ] = None
    every: Annotated[int, About("Rounds between checkpoints; 0: none.")] = 0
    retain: Annotated[int, About("How many checkpoints are kept.", 1)] = 3
    resume: Annotated[
        Path | None,
        About(
            "Go on from the newest checkpoint (the default), a given one, or none.",
            is_for_shards=True,
            metavar="auto|DIR|no",
        ),
    ] = None
    codec: Annotated[str, About("How gradients travel: see `shoestring codecs`.", metavar="CODEC")] = ""
    policy: Annotated[
        str, About("When workers exchange: every, local:16, bounded:4, async, auto.", metavar="POLICY")
    ] = ""
    tracker: Annotated[
        str,
        About(
            "Where the first worker tells loss, bytes, waiting and lag: tensorboard, wandb or trackio. "
            "Default: nowhere.",
            metavar="NAME",
        ),
    ] = ""
    timeout_s: Annotated[
        float,
        _time(
            "How long a shard may be silent before a worker gives up. Too short: a busy shard or a slow "
            "link ends the run. Too long: workers hang that long on a host that is gone."
        ),
    ] = 60.0
    incarnation: Annotated[
        int, About("Which start of this worker this is, from 1; 0: the shards count.", is_told=True)
    ] = 0
    join_timeout_s: Annotated[
        float,
        _time(
            "How long a worker that joins waits for parameters, which come once the first worker has "
            "brought them and the others' round is over. Too short: one host that starts slowly ends all "
            "workers. Too long: they hang that long on a worker that never comes."
        ),
    ] = 600.0
    ask_after_s: Annotated[
        float,
        _time(
            "How long a push may be without an answer before its worker asks for it; then twice as long, "
            "and so on. Too short: questions crowd a slow link. Too long: a lost message stops its round."
        ),
    ] = 5.0
    lease_s: Annotated[
        float,
        _time(
            "How long a worker may be silent before the shards go on without it. Too short: a worker that "
            "was stopped for a moment must start again. Too long: all others wait that long for a dead one.",
            is_for_shards=True,
        ),
    ] = 20.0
    meet_timeout_s: Annotated[
        float,
        _time(
            "Under torchrun and Slurm: how long a worker waits for the others and their shards at the "
            "start. Too short: a host that boots slowly ends the run. Too long: a missing one shows late."
        ),
    ] = 300.0
    ready_timeout_s: Annotated[
        float,
        _time(
            "How long a shard may take until it listens. "
            "Too short: it is killed on a slow disk. Too long: a shard that hangs shows late."
        ),
    ] = 600.0
    stop_grace_s: Annotated[
        float,
        _time(
            "How long a process may take from SIGTERM to its end before it is killed. Too short: a script's "
            "own clean-up is cut off. Too long: Ctrl-C takes that long where a process does not listen."
        ),
    ] = 5.0
    save_timeout_s: Annotated[
        float,
        _time(
            "How long the end of a run waits for its last checkpoint. Too short: that one is lost, and a "
            "resumed run repeats its rounds. Too long: a hanging disk delays the end.",
            is_for_shards=True,
        ),
    ] = 60.0

    @property
    def is_alone(self) -> bool:
        return not self.shards

    def to_environment(self) -> dict[str, str]:
        """The variables by which `here` gives this run back."""
        own = {setting.variable: setting.text(getattr(self, setting.name)) for setting in settings(Run)}
        return {**own, CONFIG_VARIABLE: ""}

    @classmethod
    def here(cls, environment: Mapping[str, str] = os.environ) -> "Run":
        """Read the run this process belongs to from its environment."""
        file = environment.get(CONFIG_VARIABLE)
        given = of(cls, from_file(Path(file))) if file else {}
        given.pop("workers", None)  # whoever has started this process decided that
        run = cls(**given | from_environment(cls, environment))
        if not 0 <= run.worker < run.workers or (run.workers > 1 and not run.shards):
            raise UsageError(
                f"the environment says worker {run.worker} of {run.workers}, with {len(run.shards)} shards",
                hint="start the script with `shoestring run`, or unset the `SHOESTRING_*` variables",
            )
        return run


@dataclass(frozen=True)
class Launch(_Checked):
    """What a launcher is asked for beyond the run's own settings. `None`: what fits."""

    shards: Annotated[
        int | None,
        About(
            "How many processes hold the parameters. Default: 1; on Ray, one a node.",
            1,
            256,
            variable="SHARD_COUNT",
        ),
    ] = None
    threads_per_worker: Annotated[
        int | None, About("Threads each worker computes with. Default: workers share the cores.", 1)
    ] = None
    on: Annotated[
        str,
        About(
            "Run on this Ray cluster; `ray://local` starts one on this machine.",
            panel=ON_RAY,
            metavar="ray[://HOST:PORT]",
        ),
    ] = ""
    cpus_per_worker: Annotated[
        float | None, About("Cores a worker asks for. Default: 1, or a share.", 0.001, panel=ON_RAY)
    ] = None
    gpus_per_worker: Annotated[
        float | None,
        About("GPUs a worker asks for. Default: 1 where there are any; 0.5 shares.", panel=ON_RAY),
    ] = None
    restarts: Annotated[
        int, About("How often to start again what is lost, in all.", most=1000, panel=ON_RAY)
    ] = 3
    working_dir: Annotated[
        Path | None,
        About("Folder that Ray copies to the nodes, for workers to start in.", metavar="DIR", panel=ON_RAY),
    ] = None
    env: Annotated[
        tuple[str, ...],
        About("A variable to pass on to workers; more than once for several.", metavar="NAME", panel=ON_RAY),
    ] = ()
    allow_open_ray: Annotated[bool, About("Use a cluster that asks nobody for a token.", panel=ON_RAY)] = (
        False
    )
    place_timeout_s: Annotated[
        float,
        _time(
            "How long to wait for room on the cluster. Too short: a run gives up beside others that are "
            "about to end. Too long: a run that can never fit is refused late.",
            panel=ON_RAY,
        ),
    ] = 120.0
    actor_timeout_s: Annotated[
        float,
        _time(
            "How long an actor may be silent before it counts as lost. Too short: a busy node has its "
            "workers started again. Too long: the run hangs that long on a lost node.",
            panel=ON_RAY,
        ),
    ] = 60.0


_OWNERS: tuple[Any, ...] = (Run, Launch)


@cache
def settings(owner: Any) -> tuple[Setting, ...]:
    """All settings of `Run` or `Launch`, in order."""
    hints = get_type_hints(owner, include_extras=True)
    told = {one.name: get_args(hints[one.name]) for one in fields(owner)}  # the type, and `About`
    return tuple(
        Setting(one.name, _kind(told[one.name][0]), one.default, told[one.name][1]) for one in fields(owner)
    )


def options() -> tuple[Setting, ...]:
    """The settings that a user gives: options of `shoestring run` and keys of a TOML file."""
    return tuple(one for owner in _OWNERS for one in settings(owner) if not one.about.is_told)


def of(owner: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the values that a user may give to `Run`, or to `Launch`."""
    names = {one.name for one in settings(owner) if not one.about.is_told}
    return {name: value for name, value in values.items() if name in names}


def gather(
    values: Mapping[str, Any], environment: Mapping[str, str] = os.environ, file: Path | None = None
) -> dict[str, Any]:
    """Everything a user has given: `values`, before the environment, before the TOML file."""
    named = environment.get(CONFIG_VARIABLE)
    if file is None and named:
        file = Path(named)
    found = from_file(file) if file is not None else {}
    for owner in _OWNERS:
        found |= of(owner, from_environment(owner, environment))
    return {**found, **values}


def from_environment(owner: Any, environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """The settings of `Run` or `Launch` that the environment gives. An empty variable gives nothing."""
    return {one.name: one.parse(text) for one in settings(owner) if (text := environment.get(one.variable))}


def from_file(path: Path) -> dict[str, Any]:
    """The settings that a TOML file gives."""
    try:
        values = tomllib.loads(path.read_text())
    except OSError as error:
        raise UsageError(
            f"`{path}` cannot be read: {error.strerror}", hint="give the path of a TOML file"
        ) from None
    except ValueError as error:
        raise UsageError(f"`{path}` is not TOML: {error}", hint="write lines such as `every = 500`") from None
    return from_values(values, f"in `{path}`")


def from_values(values: Mapping[str, Any], where: str = "given") -> dict[str, Any]:
    """Check settings that are given by name; an unknown name is an error that says the nearest."""
    known = {one.name: one for one in options()}
    for name in values.keys() - known.keys():
        near = difflib.get_close_matches(name, known, 1, 0.0)[0]
        raise UsageError(f"there is no setting `{name}`, {where}", hint=f"did you mean `{near}`?")
    return {name: known[name].convert(value, name) for name, value in values.items()}


def _kind(annotation: Any) -> type:
    """The type of a field, without its `None` and without what is inside a tuple."""
    if get_origin(annotation) is UnionType:
        (annotation,) = (one for one in get_args(annotation) if one is not NoneType)
    kind: type = get_origin(annotation) or annotation
    return kind
