"""How far each contestant came, by when, and with how many bytes.

What a contestant computes does not depend on the link, but for those that follow it. So each
training is run once in full where the link takes no time, which gives its scores, and on every
slow link for long enough to know what a step takes there; its losses on the way must be those
of the full run. Contestants whose bytes differ from step to step are run in full on each link, and
so are those that follow the link.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.train.race import Entry, are_equal
from benchmarks.train.trainer import Result
from benchmarks.train.workloads import Workload
from shoestring.errors import ShoestringError

_PASSED_OVER = 8  # first steps: connections open, buffers are made
_APART = 1e-2  # of a loss: the same sums in another order, after some steps


@dataclass(frozen=True)
class Row:
    """One contestant on one link."""

    contestant: str
    workload: str
    link: str
    hosts: int
    seed: int
    rate: float
    final: float  # score after the last step
    steps_to_target: float | None
    seconds_to_target: float | None
    seconds_total: float
    bytes_total: int | None  # through all network cards
    exposed_comm_s: float  # beyond what the steps take without exchange
    step_ms: float
    compute_ms: float
    is_whole: bool  # whether every step was taken on this link
    timed_seed: int  # the training whose steps were timed on this link
    are_equal: bool  # whether all replicas ended with the same bits
    scores: list[tuple[int, float]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)


def rank(
    entry: Entry,
    link: str,
    results: Sequence[Result],
    course: Sequence[Result],
    cards: int,
) -> Row:
    """Make a row of what was measured on a link; `course` is the full run of the same training.

    `cards`: how many network cards carried this race and nothing else.
    """
    first, whole = results[0], course[0]
    workload = entry.workload
    is_whole = len(first.losses) == workload.steps
    if first is not whole and not entry.contestant.follows_link:
        _refuse_other_losses(entry, first, whole)
    scores = first.scores if is_whole else whole.scores
    start = _first_timed(entry, len(first.ends_s))
    steps = len(first.ends_s) - start
    step_s = (first.ends_s[-1] - first.ends_s[start - 1]) / steps
    total_s = first.ends_s[-1] if is_whole else step_s * workload.steps
    compute_s = statistics.fmean(result.compute_s for result in results)
    reached = steps_to_target(workload, scores)
    return Row(
        contestant=entry.contestant.name,
        workload=workload.name,
        link=link,
        hosts=len(results),
        seed=entry.seed,
        rate=entry.rate,
        final=scores[-1][1],
        steps_to_target=reached,
        seconds_to_target=None if reached is None else reached * total_s / workload.steps,
        seconds_total=total_s,
        bytes_total=_bytes(results[:cards], start, workload.steps) if cards else None,
        exposed_comm_s=max(0.0, step_s - compute_s) * workload.steps,
        step_ms=1e3 * step_s,
        compute_ms=1e3 * compute_s,
        is_whole=is_whole,
        timed_seed=entry.seed,
        are_equal=are_equal(results),
        scores=scores,
        facts=first.facts,
    )


def transfer(row: Row, workload: Workload, seed: int, course: Sequence[Result]) -> Row:
    """What a timed training says of another seed's, of which the full run is known."""
    scores = course[0].scores
    reached = steps_to_target(workload, scores)
    return replace(
        row,
        seed=seed,
        final=scores[-1][1],
        steps_to_target=reached,
        seconds_to_target=None if reached is None else reached * row.seconds_total / workload.steps,
        are_equal=are_equal(course),
        scores=scores,
        facts=course[0].facts,
    )


def timed_steps(entry: Entry, least: int) -> int:
    """How many steps to take on a link: whole periods, the first of them not timed."""
    period = entry.contestant.period
    wanted = max(least, 3 * period) + _PASSED_OVER
    return min(entry.workload.steps, -(-wanted // period) * period)


def steps_to_target(workload: Workload, scores: Sequence[tuple[int, float]]) -> float | None:
    """After how many steps the target is reached, on a straight line between two scores."""
    before: tuple[int, float] | None = None
    for step, score in scores:
        if workload.is_reached(score):
            if before is None:
                return float(step)
            share = (workload.target - before[1]) / (score - before[1])
            return before[0] + share * (step - before[0])
        before = (step, score)
    return None


def _first_timed(entry: Entry, taken: int) -> int:
    period = entry.contestant.period
    start = -(-_PASSED_OVER // period) * period
    if start >= taken:
        raise ShoestringError(f"{taken} steps are too few to time", hint="take more")
    return start


def _bytes(results: Sequence[Result], start: int, steps: int) -> int:
    """Bytes of all steps; those before `start`, which open connections, once."""
    total = 0.0
    for result in results:
        each = (result.sent_bytes[-1] - result.sent_bytes[start - 1]) / (len(result.sent_bytes) - start)
        total += result.sent_bytes[start - 1] + each * (steps - start)
    return round(total)


def _refuse_other_losses(entry: Entry, found: Result, wanted: Result) -> None:
    for step, (loss, other) in enumerate(zip(found.losses, wanted.losses, strict=False), start=1):
        if loss is None or other is None or abs(loss - other) > _APART * max(1.0, abs(other)):
            raise ShoestringError(
                f"`{entry.contestant.name}` has a loss of {loss} at step {step}, "
                f"and had {other} in its full run",
                hint="a contestant whose result depends on the link must be run in full",
            )
