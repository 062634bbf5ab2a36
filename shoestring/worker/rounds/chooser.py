"""`policy="auto"`: from what steps and links are like, whether local steps pay.

A run begins with every step a round. Once compute and waiting are known, the first worker works out what
a step would take with local steps, and how many more steps to the same accuracy each kind costs
(`STEPS`). All workers change to the best at the same round, once: the optimizer's state moves from
the shards to the workers.
"""

from collections.abc import Callable

from shoestring.worker.rounds.auto import Outlook
from shoestring.worker.rounds.policy import AutoPolicy, LocalSteps, text_of

STEPS = {1: 1.0, 2: 1.02, 4: 1.04, 8: 1.15, 16: 1.3}  # to the same accuracy, by local steps a round
_GAIN = 0.85  # of the time with a round every step, at most: else it stays
_BESIDE = 0.5  # of the time of an exchange that goes on beside computing, which it slows down
_LATE = 1  # steps at most, by which answers are applied later: more costs accuracy


class Chooser:
    """The first worker's; asked after every round until it has chosen."""

    def __init__(
        self, policy: AutoPolicy, outlook: Callable[[], Outlook | None], explain: Callable[[str], None]
    ) -> None:
        self._policy = policy
        self._outlook = outlook
        self._explain = explain
        self._is_done = policy.most == 1

    def choose(self) -> tuple[str, str] | None:
        """The policy to change to, and the codec; none, or not yet."""
        outlook = None if self._is_done else self._outlook()
        if outlook is None:
            return None
        self._is_done = True
        plans = {h: _local(h, outlook) for h in STEPS if 1 < h <= self._policy.most}
        h = min(plans, key=lambda one: plans[one][0])
        local_s, late = plans[h]
        told = (
            f"{1e3 * outlook.every_s:.3g} ms a step with a round every step, "
            f"{1e3 * local_s:.3g} ms with {h} local steps, counting the steps that they cost"
        )
        if local_s > _GAIN * outlook.every_s:
            self._explain(f"policy every: {told}")
            return None
        policy = LocalSteps(h, delay=late)
        self._explain(f"policy {policy.text}:{h}" + f",delay={late}" * (late > 0) + f": {told}")
        return text_of(policy), outlook.codec


def _local(h: int, outlook: Outlook) -> tuple[float, int]:
    """What a step takes with so many local steps, counting those that they cost; and how late to answer."""
    exchange_s = outlook.exchange_s
    late = min(_LATE, h - 1) if exchange_s > outlook.compute_s else int(exchange_s > outlook.compute_s / 10)
    hidden_s = min(exchange_s, late * outlook.compute_s)
    return STEPS[h] * (outlook.compute_s + (exchange_s - (1 - _BESIDE) * hidden_s) / h), late
