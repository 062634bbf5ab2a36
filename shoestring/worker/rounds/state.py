"""The optimizer's state where the shards keep it, as torch has it: moments and step counts by parameter.

The truth lies with the shards. The state of the optimizer that was wrapped is empty as a rule. It is
filled when somebody looks (`state_dict`, `state[parameter]`), and emptied at the next step; what a script
has loaded or changed there meanwhile goes to the shards with that step, before they update anything. All
workers set the same, so the first one sends it. It is float32, of parameters in two bytes too: a second
moment of Adam's may be too small for them.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoestring.errors import RuleError
from shoestring.model.parts import Part
from shoestring.model.rules import Rule
from shoestring.model.vectors import STEP_LIMIT, STEPS, Vectors, state_names, unpack
from shoestring.worker.exchange import Exchange
from shoestring.worker.replica.replica import Replica

_TORCH_NAMES = {"momentum": "momentum_buffer"}  # where torch calls a vector otherwise

Entries = dict[Tensor, dict[str, Any]]  # by parameter


class ShardState:
    """Shows a script the state that shards keep, and takes to them what it sets."""

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        replica: Replica,
        rule: Rule,
    ) -> None:
        self._inner = inner
        self._replica = replica
        self._rule = rule
        self._exchange: Exchange | None = None
        self._seq: Callable[[], int] = lambda: 0  # the round whose state is shown
        self._vectors = {name: _TORCH_NAMES.get(name, name) for name in rule.state_names}  # torch's names
        self._shown: list[tuple[Tensor, str, Any, int]] | None = None  # what was filled in, and its versions
        self._is_set = False  # by the script
        self._leaving: dict[int, Entries] = {}  # by round: what goes to the shards

    @property
    def names(self) -> tuple[str, ...]:
        """The vectors that make the state of a part."""
        return state_names(self._rule)

    def initial(self) -> Entries:
        """The state that the optimizer has before `wrap`; raise if shards cannot keep it."""
        self._check_all()
        return self._entries()

    def connect(self, exchange: Exchange, seq: Callable[[], int]) -> None:
        """From now on the shards have the state; `seq` gives the round whose state is shown."""
        self._exchange, self._seq = exchange, seq
        self._empty()

    def hand_over(self) -> None:
        """Bring the state from the shards for good: the optimizer itself goes on from there."""
        self.show()
        self._exchange, self._shown, self._is_set = None, None, False

    def show(self) -> None:
        """Fill the optimizer's state with what the shards keep, unless it is there."""
        if self._exchange is None or self._is_set or self._shown is not None:
            return
        entries = self._read(self._exchange.fetch_state(self._seq()))
        self._inner.state.update(entries)
        self._shown = self._looks()

    def set(self) -> None:
        """Note that the script has given the optimizer another state; raise if shards cannot keep it."""
        self._check_all()
        if self._shown is not None and not self._has_changed():
            return  # what it was shown: Accelerate does that
        self._is_set = self._seq() > 0 or bool(self._entries())
        self._shown = None

    def refine(self, loaded: dict[str, Any]) -> None:
        """Take float32 from a state that torch has loaded, and rounded to what the parameters are made of."""
        ids = [name for group in loaded["param_groups"] for name in group["params"]]
        own = [parameter for group in self._inner.param_groups for parameter in group["params"]]
        places = dict(zip(own, ids, strict=True))
        for parameter in self._replica.parameters:
            state = self._inner.state.get(parameter, {})
            for key in set(state) & set(self._vectors.values()):
                exact = loaded["state"][places[parameter]][key]
                if isinstance(exact, Tensor) and exact.dtype == torch.float32 != state[key].dtype:
                    state[key] = exact.to(parameter.device)

    def leave(self, seq: int) -> bool:
        """Empty the optimizer's state at a step; say whether it goes to the shards with round `seq`."""
        if self._shown is not None and self._has_changed():
            self.set()
        is_set = self._is_set
        if is_set:
            self._leaving[seq] = self._entries()
        self._empty()
        return is_set

    def arrived(self, seq: int) -> None:
        """Note that the shards have taken what left with a round."""
        self._leaving.pop(seq, None)

    def give(self, seq: int, part: Part) -> Vectors:
        """The state of a part that goes to the shards with a round."""
        return self.vectors(part, self._leaving[seq])

    def vectors(self, part: Part, entries: Entries) -> Vectors:
        """The state of a part."""
        vectors: Vectors = {STEPS: np.zeros(len(part.pieces), np.int64)}
        vectors |= {name: np.zeros(part.size, np.float32) for name in self._rule.state_names}
        offsets = part.layout.offsets
        for place, piece in enumerate(part.pieces):
            state = entries.get(self._replica.parameters[piece.tensor])
            if not state:
                continue
            vectors[STEPS][place] = int(state.get("step", 1))
            for name, own in self._vectors.items():
                flat = state[own].detach().reshape(-1)[piece.start : piece.stop]
                vectors[name][offsets[place] : offsets[place + 1]] = flat.cpu().float().numpy()
        return vectors

    def _check_all(self) -> None:
        entries = self._entries()
        for parameter, tensor in zip(self._replica.parameters, self._replica.tensors, strict=True):
            if parameter in entries:
                self._check(tensor.name, parameter, entries[parameter])

    def _check(self, name: str, parameter: Tensor, state: dict[str, Any]) -> None:
        wanted = set(self._vectors.values()) | ({"step"} if self._rule.kind != "sgd" else set())
        if set(state) != wanted:
            raise RuleError(
                f"the optimizer's state of `{name}` has {_listed(state)}, shards keep {_listed(wanted)}",
                hint="load the state into an optimizer of the same kind and settings (momentum, amsgrad) as "
                "the one it was saved from, before it is wrapped",
            )
        for key in self._vectors.values():
            if not isinstance(state[key], Tensor) or state[key].shape != parameter.shape:
                raise RuleError(
                    f"the optimizer's state `{key}` of `{name}` does not have the shape of the parameter, "
                    f"{tuple(parameter.shape)}",
                    hint="load a state that was saved with this model",
                )
        step = float(state.get("step", 1))
        if not (0 <= step < STEP_LIMIT and step == int(step)):
            raise RuleError(
                f"the optimizer's step count of `{name}` is {step}", hint="give a whole number, 0 or more"
            )

    def _read(self, states: list[tuple[Any, bytes]]) -> Entries:
        """The shards' answers as torch's own optimizers would have them."""
        entries: Entries = {}
        groups = {p: group for group in self._inner.param_groups for p in group["params"]}
        for part, (message, payload) in zip(self._replica.parts, states, strict=True):
            vectors = unpack(message.names, memoryview(payload), part, self._rule)
            offsets = part.layout.offsets
            for place, piece in enumerate(part.pieces):
                parameter, steps = self._replica.parameters[piece.tensor], int(vectors[STEPS][place])
                if not steps or not self._has_state(groups[parameter]):
                    continue
                state = entries.setdefault(parameter, {})
                if self._rule.kind != "sgd" and "step" not in state:
                    state["step"] = _step(steps, parameter, groups[parameter])
                for name, own in self._vectors.items():
                    values = torch.from_numpy(vectors[name][offsets[place] : offsets[place + 1]].copy())
                    _put(state, own, parameter, piece.start, values)
        self._add_empty(entries, groups)
        return entries

    def _add_empty(self, entries: Entries, groups: dict[Tensor, dict[str, Any]]) -> None:
        """Parameters without values do not travel; torch counts their steps as those of any other."""
        steps = max((int(state.get("step", 1)) for state in entries.values()), default=0)
        for parameter in self._replica.parameters:
            if not steps or parameter.numel() or not self._has_state(groups[parameter]):
                continue
            state = entries[parameter] = {}
            if self._rule.kind != "sgd":
                state["step"] = _step(steps, parameter, groups[parameter])
            for own in self._vectors.values():
                _put(state, own, parameter, 0, torch.empty(0))

    def _has_state(self, group: dict[str, Any]) -> bool:
        return bool(self._vectors) and (self._rule.kind != "sgd" or group["momentum"] != 0)

    def _entries(self) -> Entries:
        """What the optimizer's state holds of the parameters that the shards update."""
        entries: Entries = {}
        for parameter in self._replica.parameters:
            state = self._inner.state.get(parameter, {})
            known = {key: value for key, value in state.items() if value is not None}  # of no first step yet
            if known:
                entries[parameter] = known
        return entries

    def _empty(self) -> None:
        for parameter in self._replica.parameters:
            self._inner.state.pop(parameter, None)
        self._is_set, self._shown = False, None

    def _looks(self) -> list[tuple[Tensor, str, Any, int]]:
        """All values there are, and the versions of tensors."""
        return [
            (parameter, key, value, value._version if isinstance(value, Tensor) else 0)
            for parameter in self._replica.parameters
            for key, value in self._inner.state.get(parameter, {}).items()
        ]

    def _has_changed(self) -> bool:
        before, now = self._shown or [], self._looks()
        return len(before) != len(now) or any(
            old[0] is not new[0] or old[1] != new[1] or old[2] is not new[2] or old[3] != new[3]
            for old, new in zip(before, now, strict=True)
        )


def _put(state: dict[str, Any], name: str, parameter: Tensor, start: int, values: Tensor) -> None:
    """Put a piece's values into a tensor like the parameter, but float32, made with the first piece."""
    if name not in state:
        kind = torch.float32
        state[name] = torch.zeros_like(parameter, dtype=kind, memory_format=torch.preserve_format).detach()
    own = state[name]
    if own.is_contiguous():
        own.view(-1)[start : start + values.numel()].copy_(values)
    else:  # e.g. channels last: change a copy in the order of the shape, then write it back
        flat = own.reshape(-1)
        flat[start : start + values.numel()] = values.to(flat)
        own.copy_(flat.view(own.shape))


def _step(steps: int, parameter: Tensor, group: dict[str, Any]) -> Tensor:
    """A step count as torch has it: on the host, but for kernels that need it beside the parameter."""
    is_beside = group.get("capturable") or group.get("fused")
    return torch.tensor(float(steps), dtype=torch.float32, device=parameter.device if is_beside else "cpu")


def _listed(names: Any) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names)) or "nothing"
