"""When workers exchange what: the sync policies.

Every policy takes a `warmup`: so many first steps are exchanged every step and uncompressed.
Written as text, for the command line: `every`, `every:delay=1`, `local:16`,
`local:h=16,outer=nesterov`, `bounded:4`, `async`.
"""

from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

from shoestring.errors import UsageError


def _refuse_unless(holds: bool, what: str, hint: str) -> None:
    if not holds:
        raise UsageError(what, hint=hint)


@dataclass(frozen=True)
class EveryStep:
    """Every step is a round; all workers hold the same bits after it.

    With `delay=1` the result of a round is applied one step later, so that communication
    hides behind compute; the gradients are then one update old. `delay=None` leaves it
    to `codec="auto"`, which turns it on where it pays.
    """

    delay: int | None = 0
    warmup: int = 0
    text: ClassVar[str] = "every"

    def __post_init__(self) -> None:
        _refuse_unless(self.delay in (None, 0, 1), f"delay is {self.delay}", "give 0 or 1")
        _refuse_unless(self.warmup >= 0, f"warmup is {self.warmup}", "give 0 or more steps")


@dataclass(frozen=True)
class LocalSteps:
    """`h` steps with the worker's own optimizer, then a round on what the parameters moved by.

    `outer="average"` takes the mean of the workers; `"nesterov"` makes an outer step of
    rate `lr` and `momentum` with it, on the shards.

    With `delay` the answer of a round is applied so many steps later, and training goes on meanwhile: what
    the parameters have moved by since is added to what was agreed on.

    `keep` says whether what a codec leaves out of a round is added to the next one, on workers and
    shards. `None`: it is, but with optimizers of Adam's kind, which train better without.
    """

    h: int
    outer: Literal["average", "nesterov"] = "average"
    warmup: int = 0
    lr: float = 0.7
    momentum: float = 0.9
    keep: bool | None = None
    delay: int = 0
    text: ClassVar[str] = "local"

    def __post_init__(self) -> None:
        _refuse_unless(self.h >= 1, f"h is {self.h}", "give 1 or more local steps")
        _refuse_unless(
            self.outer in ("average", "nesterov"), f"no outer rule `{self.outer}`", "average or nesterov"
        )
        _refuse_unless(self.warmup >= 0, f"warmup is {self.warmup}", "give 0 or more steps")
        _refuse_unless(
            self.lr > 0 and 0 <= self.momentum < 1, "lr or momentum out of range", "e.g. 0.7 and 0.9"
        )
        _refuse_unless(
            0 <= self.delay <= self.h,
            f"delay is {self.delay}",
            f"give 0 to {self.h} steps: the next round comes after that many",
        )
        _refuse_unless(self.keep in (None, True, False), f"keep is {self.keep}", "give yes or no")


@dataclass(frozen=True)
class Bounded:
    """A worker's gradient is applied when it comes; none may be more than `staleness` steps ahead."""

    staleness: int
    warmup: int = 0
    text: ClassVar[str] = "bounded"

    def __post_init__(self) -> None:
        _refuse_unless(self.staleness >= 0, f"staleness is {self.staleness}", "give 0 or more steps")
        _refuse_unless(self.warmup >= 0, f"warmup is {self.warmup}", "give 0 or more steps")


@dataclass(frozen=True)
class Async:
    """A worker's gradient is applied when it comes; nobody waits for anybody."""

    warmup: int = 0
    text: ClassVar[str] = "async"

    def __post_init__(self) -> None:
        _refuse_unless(self.warmup >= 0, f"warmup is {self.warmup}", "give 0 or more steps")


Accuracy = Literal["strict", "close", "fast"]


@dataclass(frozen=True)
class AutoPolicy:
    """Every step at first; then, once links and steps were measured, local steps where those pay.

    All workers change at the same round. `accuracy` bounds what that may cost: `"strict"` nothing, so
    that every step stays a round; `"close"` up to 4 local steps, `"fast"` up to 16.
    """

    accuracy: Accuracy = "close"
    warmup: int = 0
    text: ClassVar[str] = "auto"

    def __post_init__(self) -> None:
        _refuse_unless(self.accuracy in _ACCURACIES, f"accuracy is {self.accuracy}", "strict, close or fast")
        _refuse_unless(self.warmup >= 0, f"warmup is {self.warmup}", "give 0 or more steps")

    @property
    def most(self) -> int:
        """How many local steps a round may have."""
        return _ACCURACIES[self.accuracy]


_ACCURACIES = {"strict": 1, "close": 4, "fast": 16}  # local steps at most

Policy = EveryStep | LocalSteps | Bounded | Async
AnyPolicy = Policy | AutoPolicy
_KINDS: tuple[type[AnyPolicy], ...] = (EveryStep, LocalSteps, Bounded, Async, AutoPolicy)
_WORDS = {"none": None, "yes": True, "true": True, "no": False, "false": False}
_HINT = "one of `every`, `every:delay=1`, `local:16`, `bounded:4`, `async`, `auto`"


def make_policy(given: "str | AnyPolicy") -> AnyPolicy:
    """Build a policy from its text; one that is already built is returned as it is."""
    if isinstance(given, _KINDS):
        return given
    name, _, rest = str(given).partition(":")
    kind = next((kind for kind in _KINDS if kind.text == name.strip()), None)
    if kind is None:
        raise UsageError(f"no sync policy `{given}`", hint=_HINT)
    known = [field.name for field in fields(kind)]
    values: dict[str, Any] = {}
    for piece in rest.split(",") if rest else []:
        option, equals, value = (part.strip() for part in piece.partition("="))
        if not equals:
            option, value = known[0], option
        if option not in known:
            raise UsageError(f"policy `{name}` has no option `{option}`", hint=f"it takes {', '.join(known)}")
        values[option] = _read(given, value)
    try:
        return kind(**values)
    except TypeError:
        raise UsageError(f"policy `{given}` is not whole", hint=_HINT) from None


def text_of(policy: AnyPolicy) -> str:
    """A policy with all its options as text: equal for equal policies, and `make_policy` reads it."""
    options = ",".join(f"{field.name}={getattr(policy, field.name)}".lower() for field in fields(policy))
    return f"{policy.text}:{options}"


def _read(given: object, value: str) -> Any:
    if value in ("average", "nesterov", *_ACCURACIES):
        return value
    if value in _WORDS:
        return _WORDS[value]
    try:
        return int(value) if value.lstrip("-").isdigit() else float(value)
    except ValueError:
        raise UsageError(f"`{value}` in policy `{given}` is not a number", hint=_HINT) from None
