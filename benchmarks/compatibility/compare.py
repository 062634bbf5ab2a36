"""Say how a case came out beside DDP: `equal`, `trains`, `refused` or `wrong`.

A comparison counts only where DDP's own run shows something: both its workers ended with the same
parameters, the parameters moved, the workers' losses differ (their data did), and a tolerance is
small beside the way that the parameters went. Otherwise the row is `wrong`, whatever the other
side did.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.compatibility.case import Case
from benchmarks.compatibility.outcome import AGREED, FIRST, OWN, SHARED, STATE, Error, Outcome
from benchmarks.compatibility.shake import MARGIN, UNIT

EXACT = "float32"
_LEAST_MOVE = 1e-3
_TERMS = 256  # that a loss is a sum of
_STEPS_AT_ENDS = 3
_SHARE = 0.5  # of the fall of DDP's losses, for a training that is not DDP's
_FALL = 0.75  # of the first losses, that the last ones must be under

Pair = tuple[Outcome | None, Outcome | None]


@dataclass(frozen=True)
class Reference:
    """DDP's outcome on both workers, and that of the shaken run."""

    plain: Pair
    shaken: Pair


@dataclass(frozen=True)
class Row:
    """One case in one mode."""

    case: str
    group: str
    mode: str
    codec: str
    result: str  # equal, trains, refused, wrong
    difference: float | None  # `equal`: the largest of a value; `trains`: last losses less DDP's
    message: str


class MismatchError(Exception):
    """What is wrong, for a person."""


def judge(case: Case, mode: str, codec: str, reference: Reference, ours: Pair) -> Row:
    """Compare one case's outcome with DDP's."""

    def row(result: str, difference: float | None = None, message: str = "") -> Row:
        number = None if difference is None or not math.isfinite(difference) else difference
        return Row(case.name, case.group, mode, codec, result, number, message)

    try:
        _check_reference(case, reference)
        errors = _errors(ours)
        if errors:
            return row("refused", message=_refusal(errors))
        both = _both(ours, "Shoestring")
        check_alike(both)
        if codec == EXACT and mode != "local" and mode not in case.trains:
            plain = _both(reference.plain, "DDP")
            if mode == "wrap-model":
                return row("equal", compare_bits(plain, both))
            with suppress(MismatchError):  # an optimizer on the workers
                return row("equal", compare_bits(plain, both))
            shaken = _both(reference.shaken, "DDP")
            return row("equal", compare_values(plain, shaken, both, case.widest))
        return row("trains", check_training(case, _both(reference.plain, "DDP"), both))
    except MismatchError as found:
        return row("wrong", message=str(found))


def check_alike(both: tuple[Outcome, Outcome]) -> None:
    """Both workers hold the same bits."""
    first, second = (_of(one.values, SHARED) for one in both)
    if not first:
        raise MismatchError("the script returned no model")
    for name in first.keys() ^ second.keys():
        if name.startswith(AGREED):  # of a round that the other did not take part in
            (first if name in first else second).pop(name)
    _check_names(first, second, "the first worker", "the second")
    for name, value in first.items():
        if not _same_bits(value, second[name]):
            raise MismatchError(f"workers differ in `{name}` by {_distance(value, second[name]):.3g}")


def compare_bits(plain: tuple[Outcome, Outcome], ours: tuple[Outcome, Outcome]) -> float:
    """Everything is DDP's, bit for bit."""
    for rank, name, wanted, found in _matched(plain, ours):
        if not _same_bits(wanted, found):
            raise MismatchError(
                f"worker {rank}: `{name}` differs from DDP's by {_distance(wanted, found):.3g}"
                f"{_first_loss(plain, ours)}"
            )
    _compare_losses(plain, ours, None)
    return 0.0


def compare_values(
    plain: tuple[Outcome, Outcome],
    shaken: tuple[Outcome, Outcome],
    ours: tuple[Outcome, Outcome],
    widest: float,
) -> float:
    """Everything is DDP's within what the order of float32 operations makes (`shake.py`)."""
    worst = 0.0
    shakes = _shakes(plain, shaken)
    way = plain[0].facts.moved or 0.0
    for rank, name, wanted, found in _matched(plain, ours):
        tolerance = MARGIN * shakes[_family(name)] + _rounding(name, wanted)
        if not wanted.is_floating_point():
            tolerance = 0.0
        if name.startswith(f"{SHARED}.") and not tolerance <= widest * way:
            raise MismatchError(f"`{name}`: a tolerance of {tolerance:.3g} beside a way of {way:.3g}")
        distance = _distance(wanted, found)
        if not distance <= tolerance:
            raise MismatchError(
                f"worker {rank}: `{name}` differs from DDP's by {distance:.3g}, "
                f"more than {tolerance:.3g}{_first_loss(plain, ours)}"
            )
        worst = max(worst, distance)
    _compare_losses(plain, ours, shaken)
    return worst


def check_training(case: Case, plain: tuple[Outcome, Outcome], ours: tuple[Outcome, Outcome]) -> float:
    """It trains about as DDP does; returns how much higher the last losses are."""
    for outcome in ours:
        if not (outcome.facts.moved or 0) > _LEAST_MOVE:
            raise MismatchError("the parameters did not move")
        for name, value in _of(outcome.values, SHARED).items():
            is_number = not value.is_floating_point() or bool(value.isfinite().all())
            if not is_number and case.ends_finite:
                raise MismatchError(f"`{name}` is not finite")
    _, wanted_last = _ends(plain)
    first, last = _ends(ours)
    if case.falls:
        wanted_first, _ = _ends(plain)
        needed = first - _SHARE * (wanted_first - wanted_last)
        if not last <= needed:
            raise MismatchError(f"losses went from {first:.4g} to {last:.4g}, DDP's to {wanted_last:.4g}")
    return last - wanted_last


def _check_reference(case: Case, reference: Reference) -> None:
    errors = _errors(reference.plain) + _errors(reference.shaken)
    if errors:
        raise MismatchError(f"DDP: {errors[0].kind}: {errors[0].message}")
    plain = _both(reference.plain, "DDP")
    _both(reference.shaken, "DDP")
    try:
        check_alike(plain)
    except MismatchError as found:
        raise MismatchError(f"DDP: {found}") from None
    losses = [outcome.facts.losses for outcome in plain]
    if not losses[0] or losses[0] == losses[1]:
        raise MismatchError("DDP: both workers had the same data")
    if not all((outcome.facts.moved or 0) > _LEAST_MOVE for outcome in plain):
        raise MismatchError("DDP: the parameters did not move")
    if case.falls:
        first, last = _ends(plain)
        if not last <= _FALL * first:
            raise MismatchError(f"DDP: losses went from {first:.4g} to {last:.4g}")


def _errors(pair: Pair) -> list[Error]:
    return [
        outcome.facts.error for outcome in pair if outcome is not None and outcome.facts.error is not None
    ]


def _refusal(errors: list[Error]) -> str:
    """The text of a refusal; anything else is a mismatch."""
    for error in errors:
        if not error.is_refusal:
            places = [line for line in error.traceback.splitlines() if "shoestring" in line]
            where = f" at {places[-1].strip()}" if places else ""
            raise MismatchError(
                f"{error.kind}: {error.message}{where}" + (f" ({error.hint})" * bool(error.hint))
            )
    return f"{errors[0].message} (hint: {errors[0].hint})"


def _both(pair: Pair, who: str) -> tuple[Outcome, Outcome]:
    if pair[0] is None or pair[1] is None:
        raise MismatchError(f"{who}: a worker ended without a word")
    return pair[0], pair[1]


def _of(values: Mapping[str, Tensor], kind: str) -> dict[str, Tensor]:
    return {name: value for name, value in values.items() if name.startswith(f"{kind}.")}


def _matched(
    plain: tuple[Outcome, Outcome], ours: tuple[Outcome, Outcome]
) -> Iterator[tuple[int, str, Tensor, Tensor]]:
    for rank in range(2):
        for kind in (SHARED, STATE, FIRST, OWN):
            if kind == FIRST and rank > 0:
                continue
            wanted, found = _of(plain[rank].values, kind), _of(ours[rank].values, kind)
            _check_names(wanted, found, "DDP", f"Shoestring's worker {rank}")
            for name, value in wanted.items():
                yield rank, name, value, found[name]


def _check_names(one: Mapping[str, Tensor], two: Mapping[str, Tensor], first: str, second: str) -> None:
    for name in one.keys() ^ two.keys():
        has, lacks = (first, second) if name in one else (second, first)
        raise MismatchError(f"`{name}` is there with {has} but not with {lacks}")
    for name, value in one.items():
        other = two[name]
        if (value.dtype, value.shape) != (other.dtype, other.shape):
            raise MismatchError(
                f"`{name}` is {value.dtype} {list(value.shape)} with {first}, "
                f"{other.dtype} {list(other.shape)} with {second}"
            )


def _same_bits(one: Tensor, two: Tensor) -> bool:
    """Equal bits; zeros by their sign too, and NaN equals NaN."""
    if not one.is_floating_point():
        return torch.equal(one, two)
    nan = one.isnan()
    if not torch.equal(nan, two.isnan()) or not torch.equal(one[~nan], two[~nan]):
        return False
    return torch.equal(one[~nan].signbit(), two[~nan].signbit())


def _distance(one: Tensor, two: Tensor) -> float:
    """The largest difference of a value; NaN where only one of the two is a number."""
    if not one.numel():
        return 0.0
    alike = (one == two) | (one.isnan() & two.isnan())
    differences = (one.double() - two.double()).abs()
    return float(differences.masked_fill(alike, 0.0).max())


def _family(name: str) -> str:
    """Values of one kind: all parameters of a model, all first moments, all scores."""
    kind, key, *rest = name.split(".")
    return f"{kind}.{key}.{rest[-1]}" if kind == STATE else f"{kind}.{key}"


def _shakes(plain: tuple[Outcome, Outcome], shaken: tuple[Outcome, Outcome]) -> dict[str, float]:
    """The largest difference that shaking made, by family: that of few values may be small by chance."""
    largest: dict[str, float] = {}
    for rank, name, wanted, other in _matched(plain, shaken):
        del rank
        largest[_family(name)] = max(largest.get(_family(name), 0.0), _distance(wanted, other))
    return largest


def _rounding(name: str, wanted: Tensor) -> float:
    """One rounding on either side; a script's own values may be sums of hundreds of terms."""
    finite = wanted[wanted.isfinite()].double().abs()
    if not finite.numel() or not wanted.is_floating_point():
        return 0.0
    unit = torch.finfo(wanted.dtype).eps / 2
    return (_TERMS if name.startswith(f"{OWN}.") else 2) * unit * float(finite.max())


def _compare_losses(
    plain: tuple[Outcome, Outcome],
    ours: tuple[Outcome, Outcome],
    shaken: tuple[Outcome, Outcome] | None,
) -> None:
    for rank in range(2):
        wanted, found = plain[rank].facts.losses, ours[rank].facts.losses
        if len(wanted) != len(found):
            raise MismatchError(f"worker {rank} took {len(found)} steps, DDP's {len(wanted)}")
        shake = 0.0  # the largest so far: that of one step may be small by chance
        for step, (one, two) in enumerate(zip(wanted, found, strict=True)):
            tolerance = 0.0
            if shaken is not None:
                third = shaken[rank].facts.losses[step]
                if one is not None and third is not None:
                    shake = max(shake, abs(one - third))
                    tolerance = MARGIN * shake + _TERMS * UNIT * abs(one)
            if one is None or two is None:
                is_near = one is two
            else:
                is_near = abs(one - two) <= tolerance
            if not is_near:
                raise MismatchError(f"worker {rank}: the loss of step {step + 1} is {two}, DDP's {one}")


def _first_loss(plain: tuple[Outcome, Outcome], ours: tuple[Outcome, Outcome]) -> str:
    """From which step on losses differ."""
    for step, pairs in enumerate(zip(*(outcome.facts.losses for outcome in (*plain, *ours)), strict=False)):
        if pairs[:2] != pairs[2:]:
            return f"; losses from step {step + 1}: {pairs[2:]}, DDP's {pairs[:2]}"
    return ""


def _ends(both: tuple[Outcome, Outcome]) -> tuple[float, float]:
    """Means of the first and of the last losses of both workers."""
    means = []
    for part in (slice(None, _STEPS_AT_ENDS), slice(-_STEPS_AT_ENDS, None)):
        losses = [loss for outcome in both for loss in outcome.facts.losses[part]]
        numbers = [math.nan if loss is None else loss for loss in losses]
        means.append(sum(numbers) / len(numbers) if numbers else math.nan)
    return means[0], means[1]
