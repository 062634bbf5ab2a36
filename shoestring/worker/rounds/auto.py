"""`codec="auto"`: compress as little as the link allows, and say why.

The rates and round-trip times of the links to the shards are measured when training starts
and again from time to time; compute and waiting time with every
round. From these follows what a step would take at each level. What a level leaves out
costs further steps until the same accuracy is reached (`Level.steps`): so the level is taken whose
steps, that many more of them, take the least time. A level stays while it is not much slower
than the best, so that noise moves nothing to and fro. Float32 stays unless compressing gains
clearly, and comes back if that turns out to be no quicker: the time that waits take beyond
what the links explain is remembered, for compressed rounds and for others, and forgotten
after a while, so that both get another chance.

Where the strongest level still takes much longer than computing, the answers to a round are
applied one step later (`delay=1`), if the policy leaves that open: it costs accuracy, so it
comes last.

Levels are a worker's own affair: pushes may be coded differently by each, and the answer
to a round follows the slowest link's wish. The delay is common to all: the first worker
decides it for a later round (see `pilot.py`).
"""

import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shoestring.codec.registry import LOSSLESS
from shoestring.worker.coder import Setting
from shoestring.worker.exchange import Exchange

AUTO = "auto"


@dataclass(frozen=True)
class Level:
    """One way to code."""

    setting: Setting
    ratio: float  # about how much smaller it is than float32
    steps: float  # about how many steps it takes to the same accuracy, against float32


LEVELS = (
    Level(Setting(LOSSLESS, LOSSLESS, 32.0), 1.0, 1.0),
    Level(Setting("dct:step=1.5", "dct:step=1.5", 1.06), 30.0, 1.2),
    Level(Setting("dct:step=3", "dct:step=3", 0.38), 85.0, 1.4),
)
# After local steps coding costs almost nothing, but a step of 3 does: half a point on the residual net.
LOCAL_LEVELS = (LEVELS[0], Level(Setting("dct:step=2", "dct:step=2", 0.7), 35.0, 1.02))
_LONG_S = 0.2  # an uncompressed exchange that takes longer is not tried before compute is known
_SETTLE = 9  # rounds that a level is judged by: their median, as any one may wait for something else
_LOOK_S = 20.0  # seconds between measurements of the links
_NEAR = 1.15  # of what the best level takes: about as quick
_WORSE = 1.1  # a compressed level must take so much longer than the other to be left for it
_PART_S, _VALUE_S = 1e-3, 8e-9  # about what coding takes, there and back, for each part and value
_RETRY = 100  # rounds until what was seen of the other kind of round is forgotten; doubled each time


@dataclass(frozen=True)
class Outlook:
    """What steps and rounds take, in seconds."""

    compute_s: float  # of a step
    every_s: float  # a step that is a round, counting the steps that coding costs
    exchange_s: float  # a round after local steps, if all of it is waited for
    codec: str  # of such a round


class Auto:
    """Chooses a level for this worker, and for the first worker the delay of all."""

    def __init__(
        self,
        exchange: Exchange,
        sizes: list[int],
        parts: int,
        *,
        free_delay: bool,
        explain: Callable[[str, str], None] = lambda codec, why: None,
        prepare: Callable[[str], None] = lambda codec: None,
    ) -> None:
        self._exchange = exchange
        self._bytes = [4 * size for size in sizes]  # float32, to each shard
        self._parts = parts
        self._free_delay = free_delay
        self._explain = explain
        self._prepare = prepare
        self._level = 0
        self._is_new = True  # nothing was measured at this level yet
        self._compute_s: deque[float] = deque(maxlen=_SETTLE)
        self._waited_s: deque[float] = deque(maxlen=_SETTLE)  # at this level
        self._beside_s: dict[
            bool, float
        ] = {}  # waits beyond what links explain: of compressed rounds, or not
        self._measured_at = -_LOOK_S
        self._forget_at = 0
        self._retry = _RETRY

    def start(self, now: float) -> None:
        """Measure the links and choose a first level."""
        self._exchange.measure_links()
        self._measured_at = now
        predicted_s = self._predict_all()
        costs = costs_of(LEVELS, 0.0, predicted_s)
        coded = next(level for level in range(1, len(LEVELS)) if costs[level] <= _NEAR * min(costs[1:]))
        level = coded if predicted_s[0] > max(_LONG_S, predicted_s[coded]) else 0
        self._set(level, f"{_short(predicted_s[0] * 1e3)} ms a round uncompressed; {self._links()}")

    @property
    def level(self) -> int:
        """How hard it compresses, from 0."""
        return self._level

    def setting(self) -> Setting:
        """How the next round travels."""
        return LEVELS[self._level].setting

    def predict(self, level: int) -> float:
        """How long a round's exchange takes at a level, in seconds, if all of it is waited for."""
        return self._predict_all()[level]

    def measure(self, *, compute_s: float, exposed_s: float, seq: int, now: float) -> None:
        """Take in how long a round computed and how long it waited."""
        if self._is_new:  # the first round of a level is not like the others
            self._is_new = False
            self._forget_at = self._forget_at or seq + self._retry
            return
        self._compute_s.append(compute_s)
        self._waited_s.append(exposed_s)
        if len(self._waited_s) == _SETTLE:
            self._judge(seq, now)

    def decide_delay(self, delay: int) -> int:
        """The delay the first worker wants, `delay` being the one in force."""
        if not self._free_delay or len(self._waited_s) < _SETTLE:
            return delay
        compute_s, predicted_s = statistics.median(self._compute_s), self.predict(self._level)
        if delay == 0 and self._level == len(LEVELS) - 1 and predicted_s > 1.5 * compute_s:
            return 1
        if delay == 1 and predicted_s < 0.25 * compute_s:
            return 0
        return delay

    def _judge(self, seq: int, now: float) -> None:
        if now - self._measured_at > _LOOK_S:
            self._exchange.measure_links_soon()
            self._measured_at = now
        predicted_s = self._predict_all()  # once: rates change while others talk
        compute_s, waited_s = statistics.median(self._compute_s), statistics.median(self._waited_s)
        own = self._level > 0
        self._beside_s[own] = waited_s - predicted_s[self._level]
        if seq >= self._forget_at:
            self._beside_s.pop(not own, None)
            self._forget_at = seq + self._retry
        costs = costs_of(LEVELS, compute_s, self._waits(predicted_s))
        wanted = _choose(costs, self._level)
        if wanted == self._level:
            return
        if own != (wanted > 0):
            self._retry *= 2
            self._forget_at = seq + self._retry
        self._set(
            wanted,
            f"waits {waited_s * 1e3:.0f} ms for {compute_s * 1e3:.0f} ms of compute; " + self._links(),
        )

    def outlook(self) -> Outlook | None:
        """What the next rounds take; none while too few were seen, or where nothing leaves the machine."""
        if len(self._waited_s) < _SETTLE or all(rate == math.inf for rate in self._exchange.rates()):
            return None
        compute_s = statistics.median(self._compute_s)
        every_s = min(costs_of(LEVELS, compute_s, self._waits(self._predict_all(LEVELS))))
        costs_s = costs_of(LOCAL_LEVELS, 0.0, self._waits(self._predict_all(LOCAL_LEVELS)))
        local_s = min(costs_s)
        codec = LOCAL_LEVELS[costs_s.index(local_s)].setting.push
        return Outlook(compute_s, every_s, local_s, codec)

    def _waits(self, predicted_s: Sequence[float]) -> list[float]:
        # Of the other kind of round nothing may be known: then it waits for others as long as this one.
        unknown_s = max(0.0, self._beside_s.get(self._level > 0, 0.0))
        return [
            max(0.0, seconds + self._beside_s.get(level > 0, unknown_s))
            for level, seconds in enumerate(predicted_s)
        ]

    def _predict_all(self, levels: Sequence[Level] = LEVELS) -> list[float]:
        rates, rtt_s = self._exchange.rates(), self._exchange.rtt_s
        plain_s = sum(2 * size / rate for size, rate in zip(self._bytes, rates, strict=True))
        coding_s = _PART_S * self._parts + _VALUE_S * sum(self._bytes) / 4
        return [plain_s / one.ratio + (coding_s if n else 0.0) + rtt_s for n, one in enumerate(levels)]

    def _set(self, level: int, why: str) -> None:
        self._level, self._is_new = level, True
        self._waited_s.clear()
        self._prepare(LEVELS[level].setting.push)
        self._explain(LEVELS[level].setting.push, why)

    def _links(self) -> str:
        rates = ", ".join(_short(8e-6 * rate) for rate in self._exchange.rates() if rate < math.inf)
        links = f"links of {rates} Mbit/s" if rates else "shards on this machine"
        return f"{links}, {self._exchange.rtt_s * 1e3:.1f} ms there and back"


def _short(value: float) -> str:
    """Two digits or more: 0.13, 9.6, 123."""
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def costs_of(levels: Sequence[Level], compute_s: float, waits_s: Sequence[float]) -> list[float]:
    """What the steps to an equal accuracy take at each level, against one uncompressed step."""
    return [level.steps * (compute_s + wait_s) for level, wait_s in zip(levels, waits_s, strict=True)]


def _choose(costs: Sequence[float], level: int) -> int:
    """The level to go on with: this one, or the best if that is better by enough; float32 if it is equal."""
    best = costs.index(min(costs))
    enough = 1.0 if best == 0 else _NEAR if level == 0 else _WORSE
    return best if costs[level] > enough * costs[best] else level
