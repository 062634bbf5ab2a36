"""What each step of a round costs: prices, and how measured runs become prices.

A price is a straight line: so many seconds (or bytes) for each message, and so many for
each value or byte in it. Prices come from the processor time that every thread of real
processes took, never from the clock: so what the model says about the clock is a
prediction, also for the runs it was calibrated by.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Price:
    """What one message costs: `fixed`, and `each` for every value or byte of it."""

    fixed: float = 0.0
    each: float = 0.0

    def of(self, count: float) -> float:
        return self.fixed + self.each * count


@dataclass(frozen=True)
class Crowd:
    """What a large run has and a small one has not, in seconds."""

    member_s: float = 0.0  # a shard's, for each push, for each worker of the run
    look_s: float = 0.0  # a worker's, for each message, for each shard it is connected with
    poll_s: float = 0.0  # the same, for each answer alone
    push_s: float = 0.0  # a shard's, for each push, beside that
    message_s: float = 0.0  # a shard's, for one of many messages that wait, in or out, whatever it says

    @property
    def service_s(self) -> float:
        """What a shard takes for one of many messages of a round that wait, in or out."""
        return self.message_s + self.push_s / 2


@dataclass(frozen=True)
class Costs:
    """One codec's prices. Seconds are those of one thread, prices by value unless said otherwise."""

    codec: str
    up: Price  # bytes of a push
    down: Price  # bytes of an answer
    encode: Price  # a worker's exchange: read the gradient, add what was kept, encode, frame
    apply: Price  # a worker's training thread: decode an answer and add it
    worker_io: Price  # by byte: encrypt and send, or receive and decrypt, one message
    shard_io: Price  # by byte: the same on a shard
    service: Price  # by byte: a shard's protocol, for each message in and each out
    wake_s: float  # of the same thread, each time that it had nothing to do before
    gather: Price  # a shard's update thread: decode and add one push
    update: Price  # the same thread: apply the rule and encode the answer, once a part
    crowd: Crowd = field(default_factory=Crowd)


@dataclass(frozen=True)
class Usage:
    """The processor seconds of a round by thread, those of all workers and of all shards together."""

    exchange: float
    training: float
    worker_io: float
    service: float
    update: float
    shard_io: float

    def plus(self, other: "Usage") -> "Usage":
        names = self.__dataclass_fields__
        return Usage(**{name: getattr(self, name) + getattr(other, name) for name in names})

    def times(self, factor: float) -> "Usage":
        return Usage(**{name: factor * getattr(self, name) for name in self.__dataclass_fields__})


@dataclass(frozen=True)
class Run:
    """Measured rounds of some workers, each on a host with a shard, all on this machine."""

    codec: str
    workers: int
    parts: tuple[int, ...]  # the values of each
    homes: tuple[int, ...]  # the shard that holds each
    round_s: float  # the median
    fastest_s: float
    rounds: int
    usage: Usage  # of the mean round
    up_bytes: int  # one worker's, a round
    down_bytes: int
    memory_bytes: int  # what the shard with the most took for the run
    size_mb: float
    others: float  # the share of the machine's time that other processes took meanwhile
    cores: int  # that all processes shared
    threads: int  # that each shard had for updates

    @property
    def values(self) -> int:
        return sum(self.parts)


def fit_costs(runs: Sequence[Run], crowd: Crowd) -> Costs:
    """Find the prices that explain best what the threads of these runs of one codec did."""
    if len({run.codec for run in runs}) != 1:
        raise ValueError("costs are those of one codec")

    def messages(run: Run) -> float:
        return run.workers * len(run.parts)

    def values(run: Run) -> float:
        return run.workers * run.values

    def traffic(run: Run) -> float:
        return run.workers * (run.up_bytes + run.down_bytes)

    def price(
        spent: Callable[[Run], float], count: Callable[[Run], float], size: Callable[[Run], float]
    ) -> Price:
        return Price(*_solve([[count(run), size(run)] for run in runs], [spent(run) for run in runs]))

    def looking(run: Run) -> float:
        return messages(run) * run.workers * (2 * crowd.look_s + crowd.poll_s)

    def both(run: Run) -> float:  # a message in and one out
        return 2 * messages(run)

    def wakes(run: Run) -> float:  # by each push, and by the end of each update
        return len(run.parts) * (run.workers + 1)

    woken = price(lambda run: max(0.0, run.usage.service - both(run) * crowd.service_s), wakes, traffic)

    sums = [
        [float(len(run.parts)), float(run.values), messages(run), values(run)] for run in runs
    ]  # of updates, and of the pushes in them
    update = _solve(sums, [run.usage.update for run in runs])
    return Costs(
        codec=runs[0].codec,
        up=price(lambda run: run.workers * run.up_bytes, messages, values),
        down=price(lambda run: run.workers * run.down_bytes, messages, values),
        encode=price(lambda run: max(0.0, run.usage.exchange - looking(run)), messages, values),
        apply=price(lambda run: run.usage.training, messages, values),
        worker_io=price(lambda run: run.usage.worker_io, both, traffic),
        shard_io=price(lambda run: run.usage.shard_io, both, traffic),
        service=Price(crowd.service_s, woken.each),
        wake_s=woken.fixed,
        update=Price(update[0], update[1]),
        gather=Price(update[2], update[3]),
        crowd=crowd,
    )


def _solve(sums: Sequence[Sequence[float]], wanted: Sequence[float]) -> list[float]:
    """Solve in the least squares of relative errors, without prices below zero."""
    matrix, target = np.array(sums, float), np.array(wanted, float)
    weight = 1 / np.maximum(target, 1e-9 * max(float(target.max()), 1e-300))
    scaled = matrix * weight[:, None]
    size = np.maximum(np.linalg.norm(scaled, axis=0), 1e-300)  # columns differ by many powers of ten
    found = np.zeros(matrix.shape[1])
    free = list(range(matrix.shape[1]))
    while free:
        answer = np.linalg.lstsq(scaled[:, free] / size[free], target * weight, rcond=None)[0]
        worst = int(np.argmin(answer))
        if answer[worst] >= 0:
            found[free] = answer / size[free]
            break
        del free[worst]  # what would pay back is left out, and the others are found anew
    return [float(value) if math.isfinite(value) else 0.0 for value in found]
