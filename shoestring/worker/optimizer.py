"""The optimizer a script gets from `wrap`: steps become rounds with the shards.

It stands in for the torch optimizer that it was made from: `param_groups` and `state` are that one's,
so schedulers (made before `wrap` or after), `zero_grad` and checkpoints work on it as they did. What a
step does depends on the sync policy: see `gradients.py` (the update on the shards) and `differences.py`
(local steps).
"""

import contextlib
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch

from shoestring.checkpoint.saver import Saver
from shoestring.errors import UsageError
from shoestring.wire.messages import PolicyChange
from shoestring.worker.exchange import Traffic
from shoestring.worker.reporter import Reporter
from shoestring.worker.rounds.differences import DifferenceRounds
from shoestring.worker.rounds.gradients import GradientRounds
from shoestring.worker.rounds.scale import watch
from shoestring.worker.rounds.state import ShardState
from shoestring.worker.trial import Trial

# Torch keeps them in dictionaries: those of the optimizer that was wrapped are used on.
_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


class SharedOptimizer(torch.optim.Optimizer):
    """Takes the place of the optimizer given to `wrap`."""

    # Has a `GradScaler` call `step` whatever it has found in this worker's gradients: all workers step.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        drivers: list[GradientRounds | DifferenceRounds],
        saver: Saver | None,
        reporter: Reporter,
        take_in: Callable[[], None],
        change: Callable[[PolicyChange], DifferenceRounds | None],
    ) -> None:
        self._is_made = False
        watch()
        self.inner = inner
        super().__init__(inner.param_groups, inner.defaults)
        self.driver = drivers[0]
        self._drivers = drivers  # the others are of parameters that came later
        self._is_local = isinstance(self.driver, DifferenceRounds)  # the inner optimizer steps
        self._scaler: Any = None  # that is having this step
        self._is_unscaled = False
        for name in _HOOKS[2 if self._is_local else 0 :]:  # that one calls hooks of steps itself
            setattr(self, name, getattr(inner, name))
        self._saver = saver
        self._reporter = reporter
        self._take_in = take_in  # parameters that are trained from now on
        self._change = change  # goes on with another policy
        self._trial = Trial()
        self._samples = 0
        self._loaded: dict[str, Any] | None = None  # what is being loaded, as it was given
        self._is_made = True

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the optimizer that was wrapped: one object for script, schedulers and shards."""
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        if self._is_made:  # torch sets it while this is being made
            self.inner.param_groups = groups

    @property
    def state(self) -> Any:
        """The state of the optimizer that was wrapped. Where shards keep it, it is fetched from them.

        It is what they have after the last step, and with a delay of 1 after that step's round. With
        `Bounded` and `Async` each part is as pushes have left it so far, other workers' among them. What
        is changed in it, by all workers alike, goes to the shards with the next step.
        """
        for state in self._states():
            state.show()
        return self.inner.state

    @state.setter
    def state(self, state: Any) -> None:
        if self._is_made:
            self.inner.state = state
            self._note_state()

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
        if isinstance(self.driver, DifferenceRounds):
            self.driver.closure = closure  # which some optimizers call several times
        elif closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._take_in()
        is_one = len(self._drivers) == 1  # else all skip if one must: none commits before all are sent
        are_finite = [driver.send(commits=is_one) for driver in self._drivers]
        is_skipped = not all(are_finite) or self._finds_infinity()
        has_ended = [driver.step(skip=is_skipped) for driver in self._drivers]
        self._is_unscaled = False
        if has_ended[0] and self._saver is not None:
            self._saver.round_ended(self.driver.rounds, self.driver.steps)
        # What schedulers look at that were made before `wrap`: their optimizer has taken a step.
        self.inner._opt_called = True  # type: ignore[attr-defined]
        self._reporter.step_done(self.driver.steps, self._samples)
        self._samples = 0
        if self._scaler is None:
            self._change_policy()
        return self.driver.loss if isinstance(self.driver, DifferenceRounds) else loss

    @contextlib.contextmanager
    def unscaling(self, scaler: Any) -> Iterator[None]:
        """Around `scaler.unscale_(optimizer)`: gradients change in place, and were sent unscaled."""
        with contextlib.ExitStack() as stack:
            for driver in self._drivers:
                stack.enter_context(driver.unscaling())
            yield
        self._is_unscaled = True

    @contextlib.contextmanager
    def stepping(self, scaler: Any) -> Iterator[None]:
        """Around `scaler.step(optimizer)`.

        What the scaler finds out of this worker's gradients alone gives way to what has become of the
        step: if one worker's gradients were not finite all skip it, and every scaler hears of that.
        """
        with contextlib.ExitStack() as stack:
            for driver in self._drivers:
                stack.enter_context(driver.stepping(scaler))
            self._scaler = scaler
            try:
                yield
            finally:
                self._scaler, self._is_unscaled = None, False
        if not self._is_local:
            is_skipped = any(driver.is_skipped for driver in self._drivers)
            for found in scaler._found_inf_per_device(self).values():
                found.fill_(float(is_skipped))
            self._change_policy()

    def _change_policy(self) -> None:
        """Go on with the policy that was chosen, if this is the round after which all workers do."""
        change = self.driver.pilot.change
        if self._is_local or change is None or change.round != self.driver.rounds:
            return
        new = self._change(change)
        if new is None:
            return
        self.driver, self._is_local = new, True
        for name in _HOOKS[:2]:  # the inner optimizer calls them from now on
            setattr(self, name, OrderedDict())

    def _finds_infinity(self) -> bool:
        """Unscale the gradients of a local step; say whether the scaler has found them not to be finite."""
        if not self._is_local or self._scaler is None:
            return False
        if not self._is_unscaled:
            self._scaler.unscale_(self)
        return any(bool(found) for found in self._scaler._found_inf_per_device(self).values())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state as torch does; what does not fit is refused and changes nothing.

        Called by all workers alike: shards take the first one's with the next step.
        """
        before = self.inner.param_groups, self.inner.state
        hook = self.register_load_state_dict_pre_hook(_note_loaded)  # after the script's own
        try:
            super().load_state_dict(state_dict)
            for driver in self._drivers:
                driver.check_groups()
            self._note_state()
        except Exception:
            self.inner.param_groups, self.inner.state = before
            raise
        finally:
            hook.remove()
            self._loaded = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take groups and state that were loaded."""
        if "inner" not in self.__dict__:
            raise _copied()
        self.inner.__setstate__(state)
        if self._loaded is not None:
            for own in self._states():
                own.refine(self._loaded)

    def __getstate__(self) -> dict[str, Any]:
        raise _copied()

    def _note_state(self) -> None:
        for state in self._states():
            state.set()

    def _states(self) -> list[ShardState]:
        """What shows and sets the state that the shards keep."""
        states = (driver.state for driver in self._drivers) if self._is_made else ()
        return [state for state in states if state is not None]

    @contextlib.contextmanager
    def agreed(self) -> Iterator[None]:
        """Within, parameters are what all workers agreed on last: the same bits on all of them.

        With local steps workers' parameters differ between rounds, and with a delay always. Evaluate and
        save in here; afterwards parameters are what they were. With other policies nothing changes.
        """
        driver = self.driver
        with driver.agreed() if isinstance(driver, DifferenceRounds) else contextlib.nullcontext():
            yield

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
        digests = [driver.replica.digest() for driver in self._drivers]
        return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Train further parameters, those of the wrapped model alone; all workers add the same."""
        if self._is_made:
            self.inner.add_param_group(param_group)


def _note_loaded(optimizer: torch.optim.Optimizer, given: dict[str, Any]) -> None:
    if isinstance(optimizer, SharedOptimizer):
        optimizer._loaded = given


def _copied() -> UsageError:
    return UsageError(
        "a wrapped optimizer cannot be copied or pickled: it is connected to the run's shards",
        hint="save and load `optimizer.state_dict()`",
    )
