"""What each step of a round costs: prices, and how measured runs become prices.

A price is a straight line: so many seconds (or bytes) for each message, and so many for
each value or byte in it. Prices come from the processor time that every thread of real
processes took, never from the clock: so what the model says about the clock is a
prediction, also for the runs it was calibrated by.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter

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
    # What every further worker and shard on one machine, as they share its caches and memory, makes all
    # of the above longer by.
    neighbour: float = 0.0


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

    @property
    def total(self) -> float:
        return float(sum(getattr(self, name) for name in self.__dataclass_fields__))

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


_NEIGHBOURS = tuple(0.001 * step for step in range(51))


def crowding(neighbour: float, workers: int) -> float:
    """How much longer everything takes with so many workers and shards on one machine."""
    return 1 + neighbour * (workers - 1)


def fit_costs(runs: Sequence[Run], crowd: Crowd) -> Costs:
    """Find the prices that explain best what the threads of these runs of one codec did."""
    if len({run.codec for run in runs}) != 1:
        raise ValueError("costs are those of one codec")

    def fit(neighbour: float) -> Costs:
        """The prices, had each worker and its shard had a machine for themselves."""
        alone = [replace(run, usage=run.usage.times(1 / crowding(neighbour, run.workers))) for run in runs]
        return replace(_fit_alone([_Load(run, crowd) for run in alone]), neighbour=neighbour)

    def misfit(costs: Costs) -> float:
        totals = [
            (crowding(costs.neighbour, run.workers) * _Load(run, crowd).price(costs), run.usage.total)
            for run in runs
        ]
        return sum((predicted / max(spent, 1e-300) - 1) ** 2 for predicted, spent in totals)

    return min(map(fit, _NEIGHBOURS), key=misfit)


@dataclass(frozen=True)
class _Load:
    """How much of everything a round of a run has, all workers and shards together."""

    run: Run
    crowd: Crowd

    @property
    def messages(self) -> float:
        return self.run.workers * len(self.run.parts)

    @property
    def both(self) -> float:  # a message in and one out
        return 2 * self.messages

    @property
    def values(self) -> float:
        return self.run.workers * self.run.values

    @property
    def traffic(self) -> float:
        return self.run.workers * (self.run.up_bytes + self.run.down_bytes)

    @property
    def wakes(self) -> float:  # by each push, and by the end of each update
        return len(self.run.parts) * (self.run.workers + 1)

    @property
    def looking_s(self) -> float:
        return self.messages * self.run.workers * (2 * self.crowd.look_s + self.crowd.poll_s)

    @property
    def protocol_s(self) -> float:
        return self.both * self.crowd.service_s

    @property
    def sums(self) -> list[float]:  # updates, and the pushes in them
        return [float(len(self.run.parts)), float(self.run.values), self.messages, self.values]

    def price(self, costs: Costs) -> float:
        """The processor seconds of all threads, at these prices."""
        by_value = self.messages * (costs.encode.fixed + costs.apply.fixed)
        by_value += self.values * (costs.encode.each + costs.apply.each)
        by_byte = self.both * (costs.worker_io.fixed + costs.shard_io.fixed)
        by_byte += self.traffic * (costs.worker_io.each + costs.shard_io.each + costs.service.each)
        updates = (costs.update.fixed, costs.update.each, costs.gather.fixed, costs.gather.each)
        summed = sum(count * each for count, each in zip(self.sums, updates, strict=True))
        return by_value + by_byte + summed + self.looking_s + self.protocol_s + self.wakes * costs.wake_s


def _fit_alone(loads: Sequence[_Load]) -> Costs:
    def price(
        spent: Callable[[_Load], float], count: Callable[[_Load], float], size: Callable[[_Load], float]
    ) -> Price:
        return Price(*_solve([[count(load), size(load)] for load in loads], list(map(spent, loads))))

    messages, both, values, traffic, wakes = map(
        attrgetter, ("messages", "both", "values", "traffic", "wakes")
    )
    woken = price(lambda load: max(0.0, load.run.usage.service - load.protocol_s), wakes, traffic)
    update = _solve([load.sums for load in loads], [load.run.usage.update for load in loads])
    return Costs(
        codec=loads[0].run.codec,
        up=price(lambda load: load.run.workers * load.run.up_bytes, messages, values),
        down=price(lambda load: load.run.workers * load.run.down_bytes, messages, values),
        encode=price(lambda load: max(0.0, load.run.usage.exchange - load.looking_s), messages, values),
        apply=price(lambda load: load.run.usage.training, messages, values),
        worker_io=price(lambda load: load.run.usage.worker_io, both, traffic),
        shard_io=price(lambda load: load.run.usage.shard_io, both, traffic),
        service=Price(loads[0].crowd.service_s, woken.each),
        wake_s=woken.fixed,
        update=Price(update[0], update[1]),
        gather=Price(update[2], update[3]),
        crowd=loads[0].crowd,
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
