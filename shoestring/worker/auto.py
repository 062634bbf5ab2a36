"""`codec="auto"`: compress as little as the link allows, and say why.

The rates and round-trip times of the links to the shards are measured with a small probe
when training starts and again from time to time; compute and waiting time with every
round. From these follows how long a round would take at each level. While workers wait for
more than `TOLERATED` of the compute time, the mildest level is taken that is about as quick
as the quickest: where delay takes the time, not bytes, leaving out more gains nothing. What
is left out costs steps: so float32 stays, or comes back, unless compressed steps are quicker,
computing and all, by more than the further steps that the same accuracy then takes (`_STEPS`).
Where the strongest level still takes much longer than computing, the answers to a round are
applied one step later (`delay=1`), if the policy leaves that open: it costs accuracy, so it
comes last.

Levels are a worker's own affair: pushes may be coded differently by each, and the answer
to a round follows the slowest link's wish. The delay is common to all: the first worker
plans it for a later round (see `pilot.py`).
"""

from collections.abc import Callable

from shoestring.server.holding import LOSSLESS
from shoestring.worker.courier import Setting
from shoestring.worker.exchange import Exchange

AUTO = "auto"
LEVELS = (
    Setting(LOSSLESS, LOSSLESS, 32.0),
    Setting("dct:step=1.5", "dct:step=1.5", 1.06),
    Setting("dct:step=2.5", "dct:step=2.5", 0.64),
    Setting("dct:step=3", "dct:step=3", 0.38),
)
RATIOS = (1.0, 30.0, 50.0, 85.0)  # about how much smaller than float32 each level is
TOLERATED = 0.15  # of the compute time
_LONG_S = 0.2  # an uncompressed exchange that takes longer is not tried before compute is known
_SETTLE = 8  # rounds before a level is judged
_LOOK_S = 20.0  # seconds between probes
_WORTH = 1.2  # a stronger level must be this much quicker to be worth what it leaves out
_STEPS = 1.3  # times as many steps as uncompressed ones: 1.15 for a residual net, 1.3 for a transformer
_NEAR = 1.15  # of the quickest: about as quick
_CHANGED = 1.5  # a link whose rate changes by so much is another one
_PART_S, _VALUE_S = 1e-3, 8e-9  # about what coding takes, there and back, for each part and value
_EASE = 0.5  # a lower level must look this good against `TOLERATED`
_RETRY = 100  # rounds before a level that was too slow is tried again; doubled each time


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
    ) -> None:
        self._exchange = exchange
        self._bytes = [4 * size for size in sizes]  # float32, to each shard
        self._parts = parts
        self._free_delay = free_delay
        self._explain = explain
        self._level = 0
        self._since = 0  # round from which this level is measured
        self._compute_s = 0.0
        self._exposed_s = 0.0
        self._probed_at = -_LOOK_S
        self._retry_at = 0
        self._retry = _RETRY
        self._seen_s: dict[bool, float] = {}  # how long rounds waited on these links: compressed, or not
        self._seen_at: list[float] = []  # the rates of the links then

    def start(self, now: float) -> None:
        """Probe the links and choose a first level."""
        self._exchange.probe()
        self._probed_at = now
        plain_s = self.predict(0)
        level = 1 if plain_s > max(_LONG_S, self.predict(1)) else 0
        self._set(level, 0, f"{plain_s * 1e3:.0f} ms a round uncompressed; {self._links()}")

    def setting(self) -> Setting:
        """How the next round travels."""
        return LEVELS[self._level]

    def predict(self, level: int) -> float:
        """How long a round's exchange takes at a level, in seconds, if all of it is waited for."""
        rates = self._exchange.rates()
        transfer_s = sum(
            2 * size / rate / RATIOS[level] for size, rate in zip(self._bytes, rates, strict=True)
        )
        coding_s = (_PART_S * self._parts + _VALUE_S * sum(self._bytes) / 4) if level else 0.0
        return transfer_s + coding_s + self._exchange.rtt_s

    def measure(self, *, compute_s: float, exposed_s: float, seq: int, now: float) -> None:
        """Take in how long a round computed and how long it waited."""
        share = 0.3 if self._compute_s else 1.0
        self._compute_s += share * (compute_s - self._compute_s)
        if seq > self._since:  # the first round of a level is not like the others
            share = 0.3 if self._exposed_s else 1.0
            self._exposed_s += share * (exposed_s - self._exposed_s)
        if seq >= self._since + _SETTLE:
            self._judge(seq, now)

    def plan_delay(self, delay: int) -> int:
        """The delay the first worker wants, `delay` being the one in force."""
        if not self._free_delay or not self._exposed_s:
            return delay
        if (
            delay == 0
            and self._level == len(LEVELS) - 1
            and self.predict(self._level) > 1.5 * self._compute_s
        ):
            return 1
        if delay == 1 and self.predict(self._level) < 0.25 * self._compute_s:
            return 0
        return delay

    def _judge(self, seq: int, now: float) -> None:
        if now - self._probed_at > _LOOK_S:
            self._exchange.ask_rates()
            self._probed_at = now
        self._remember()
        wanted = self._choose()
        if wanted > self._level:
            self._retry_at, self._retry = seq + self._retry, 2 * self._retry
        elif seq < self._retry_at:
            return
        if wanted != self._level:
            self._set(
                wanted,
                seq + 1,
                f"waits {self._exposed_s * 1e3:.0f} ms for {self._compute_s * 1e3:.0f} ms of compute; "
                + self._links(),
            )

    def _choose(self) -> int:
        tolerated_s = TOLERATED * self._compute_s
        if self._exposed_s <= tolerated_s:
            bearable_s = max(_EASE * tolerated_s, self.predict(self._level))
            return next(level for level in range(self._level + 1) if self.predict(level) <= bearable_s)
        quickest_s = min(map(self.predict, range(1, len(LEVELS))))
        enough_s = max(tolerated_s, _NEAR * quickest_s)
        best = next(level for level in range(1, len(LEVELS)) if self.predict(level) <= enough_s)
        if self._level == 0:
            # Worth it only if it is the bytes that take the time, and fewer of them take less.
            beside_s = max(self._exposed_s - self.predict(0), 0.0)
            coded_s = self._seen_s.get(True, beside_s + self.predict(best))
            return best if self._saves_steps(self._exposed_s, coded_s) else 0
        if not self._saves_steps(self._seen_s.get(False, self.predict(0)), self._exposed_s):
            return 0
        is_worth = self.predict(self._level) > _WORTH * self.predict(best)
        return best if best < self._level or is_worth else self._level

    def _saves_steps(self, plain_s: float, coded_s: float) -> bool:
        """Whether rounds that wait so long are worth compressing, given what they wait for then."""
        return self._compute_s + plain_s > _STEPS * (self._compute_s + coded_s)

    def _remember(self) -> None:
        """Note how long rounds wait, uncompressed or not; forget it if the links have changed."""
        rates = self._exchange.rates()
        pairs = zip(rates, self._seen_at, strict=False)
        if any(new != old and not 1 / _CHANGED < new / old < _CHANGED for new, old in pairs):
            self._seen_s.clear()
        if not self._seen_s:
            self._seen_at = rates
        self._seen_s[self._level > 0] = self._exposed_s

    def _set(self, level: int, since: int, why: str) -> None:
        self._level, self._since, self._exposed_s = level, since, 0.0
        self._explain(LEVELS[level].push, why)

    def _links(self) -> str:
        rates = ", ".join(f"{8e-6 * rate:.0f}" for rate in self._exchange.rates())
        return f"links of {rates} Mbit/s, {self._exchange.rtt_s * 1e3:.1f} ms there and back"
