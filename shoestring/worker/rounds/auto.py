"""`codec="auto"`: compress as little as the link allows, and say why.

The rates and round-trip times of the links to the shards are measured when training starts
and again from time to time; compute and waiting time with every
round. From these follows what a step would take at each level. What a level leaves out
costs further steps until the same accuracy is reached (`STEPS`): so the level is taken whose
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

from shoestring.codec.registry import LOSSLESS
from shoestring.worker.coder import Setting
from shoestring.worker.exchange import Exchange

AUTO = "auto"
LEVELS = (
    Setting(LOSSLESS, LOSSLESS, 32.0),
    Setting("dct:step=1.5", "dct:step=1.5", 1.06),
    Setting("dct:step=3", "dct:step=3", 0.38),
)
RATIOS = (1.0, 30.0, 85.0)  # about how much smaller than float32 each level is
STEPS = (1.0, 1.2, 1.4)  # about how many steps each takes to the same accuracy, against float32
_LONG_S = 0.2  # an uncompressed exchange that takes longer is not tried before compute is known
_SETTLE = 9  # rounds that a level is judged by: their median, as any one may wait for something else
_LOOK_S = 20.0  # seconds between measurements of the links
_NEAR = 1.15  # of what the best level takes: about as quick
_WORSE = 1.1  # a compressed level must take so much longer than the other to be left for it
_PART_S, _VALUE_S = 1e-3, 8e-9  # about what coding takes, there and back, for each part and value
_RETRY = 100  # rounds until what was seen of the other kind of round is forgotten; doubled each time


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
        costs = _costs(0.0, predicted_s)
        coded = next(level for level in range(1, len(LEVELS)) if costs[level] <= _NEAR * min(costs[1:]))
        level = coded if predicted_s[0] > max(_LONG_S, predicted_s[coded]) else 0
        self._set(level, f"{_short(predicted_s[0] * 1e3)} ms a round uncompressed; {self._links()}")

    @property
    def level(self) -> int:
        """How hard it compresses: a place in `LEVELS`."""
        return self._level

    def setting(self) -> Setting:
        """How the next round travels."""
        return LEVELS[self._level]

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
        # Of the other kind of round nothing may be known: then it waits for others as long as this one.
        unknown_s = max(0.0, self._beside_s[own])
        waits_s = [
            max(0.0, seconds + self._beside_s.get(level > 0, unknown_s))
            for level, seconds in enumerate(predicted_s)
        ]
        costs = _costs(compute_s, waits_s)
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

    def _predict_all(self) -> list[float]:
        rates, rtt_s = self._exchange.rates(), self._exchange.rtt_s
        plain_s = sum(2 * size / rate for size, rate in zip(self._bytes, rates, strict=True))
        coding_s = _PART_S * self._parts + _VALUE_S * sum(self._bytes) / 4
        return [plain_s / ratio + (coding_s if level else 0.0) + rtt_s for level, ratio in enumerate(RATIOS)]

    def _set(self, level: int, why: str) -> None:
        self._level, self._is_new = level, True
        self._waited_s.clear()
        self._prepare(LEVELS[level].push)
        self._explain(LEVELS[level].push, why)

    def _links(self) -> str:
        rates = ", ".join(_short(8e-6 * rate) for rate in self._exchange.rates() if rate < math.inf)
        links = f"links of {rates} Mbit/s" if rates else "shards on this machine"
        return f"{links}, {self._exchange.rtt_s * 1e3:.1f} ms there and back"


def _short(value: float) -> str:
    """Two digits or more: 0.13, 9.6, 123."""
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def _costs(compute_s: float, waits_s: Sequence[float]) -> list[float]:
    """What the steps to an equal accuracy take at each level, against one uncompressed step."""
    return [steps * (compute_s + wait_s) for steps, wait_s in zip(STEPS, waits_s, strict=True)]


def _choose(costs: Sequence[float], level: int) -> int:
    """The level to go on with: this one, or the best if that is better by enough; float32 if it is equal."""
    best = costs.index(min(costs))
    enough = 1.0 if best == 0 else _NEAR if level == 0 else _WORSE
    return best if costs[level] > enough * costs[best] else level
