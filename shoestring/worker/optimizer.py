"""The optimizer a script gets from `wrap`: steps become rounds with the shards.

It is a torch optimizer over the same parameter groups, so schedulers and `zero_grad` work
on it as on the one it replaces. What a step does depends on the sync policy: see
`gradients.py` (the update on the shards) and `differences.py` (local steps).
"""

from collections.abc import Callable
from typing import Any

import torch

from shoestring.checkpoint.saver import Saver
from shoestring.errors import UsageError
from shoestring.worker.exchange import Traffic
from shoestring.worker.reporter import Reporter
from shoestring.worker.rounds.differences import DifferenceRounds
from shoestring.worker.rounds.gradients import GradientRounds
from shoestring.worker.trial import Trial


class SharedOptimizer(torch.optim.Optimizer):
    """Takes the place of the optimizer given to `wrap`."""

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        driver: GradientRounds | DifferenceRounds,
        saver: Saver | None,
        reporter: Reporter,
    ) -> None:
        self._is_made = False
        super().__init__(inner.param_groups, inner.defaults)
        self.inner = inner
        self.driver = driver
        self._saver = saver
        self._reporter = reporter
        self._trial = Trial()
        self._samples = 0
        self._is_made = True

    @property
    def steps(self) -> int:
        """How many steps this run has taken, those before a resume included."""
        return self.driver.steps

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Exchange, and bring the parameters up to date, as the sync policy says."""
        if self._saver is not None:
            self._saver.step_begins()
        self._trial.step_begins(self.driver.rounds)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.driver.step() and self._saver is not None:
            self._saver.round_ended(self.driver.rounds, self.driver.steps)
        self._reporter.step_done(self.driver.steps, self._samples)
        self._samples = 0
        return loss

    def report(
        self, *, loss: float | None = None, samples: int | None = None, total: int | None = None
    ) -> None:
        """Tell the run's progress display this step's loss and samples, and how many steps there will be."""
        if loss is not None:
            self._reporter.loss = float(loss)
        if total is not None:
            self._reporter.total = total
        self._samples += samples or 0

    @property
    def values(self) -> int:
        """How many values are trained."""
        return self.driver.replica.total

    @property
    def traffic(self) -> Traffic:
        """The bytes this worker has sent and received so far."""
        return self.driver.coder.exchange.traffic

    def parameter_hash(self) -> str:
        """A hash of the trained parameters: equal on workers that hold the same bits."""
        return self.driver.replica.digest()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._is_made:
            raise UsageError(
                "parameters cannot be added after `wrap`",
                hint="build the optimizer with all groups, then wrap it",
            )
        super().add_param_group(param_group)
