"""The model's parameters, seen as the parts that travel.

Values cross between tensors, wherever they lie and whatever they are made of, and flat float32
vectors of a part, on the host or on the device where the tensors are. What is written is rounded to
what the parameters are made of. Only trainable parameters take part; frozen ones are left alone.
Weights that are shared by several modules are one parameter.
"""

import contextlib
import hashlib
import itertools
from collections.abc import Collection, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from shoestring.codec.base import Vector
from shoestring.compiled.scratch import room
from shoestring.errors import UsageError
from shoestring.model import table
from shoestring.model.parts import Part, cut
from shoestring.model.precision import DTYPES
from shoestring.model.vectors import checksums_of
from shoestring.wire.messages import CHECKSUMS_LIMIT
from shoestring.worker.replica import device
from shoestring.worker.replica.device import common_device

_COMPLEX = "train the real and the imaginary part as a parameter each, and join them by `torch.complex`"
_CURES = {"complex64": _COMPLEX, "complex128": _COMPLEX, "complex32": _COMPLEX}


class Replica:
    """One worker's copy of the parameters that a run trains."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        only: Collection[nn.Parameter] | None = None,
    ) -> None:
        """Without an optimizer only gradients travel. `only`: leave out all parameters but these."""
        groups: dict[Tensor, int] = {
            parameter: index
            for index, group in enumerate([] if optimizer is None else optimizer.param_groups)
            for parameter in group["params"]
            if only is None or parameter in only
        }
        named = {
            parameter: name
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and (only is None or parameter in only)
        }
        if optimizer is None:  # the script updates the parameters
            groups = dict.fromkeys(named, 0)
        self.parameters = [parameter for parameter in named if parameter in groups]
        self.tensors = tuple(
            table.Tensor(named[parameter], tuple(parameter.shape), groups[parameter], _name(parameter.dtype))
            for parameter in self.parameters
        )
        _check(self.parameters, named, groups, takes_float64=optimizer is None)
        self.parts = cut([tensor.shape for tensor in self.tensors])
        self.precisions = [table.precision_of(part, self.tensors) for part in self.parts]
        self.parts_of_parameter: list[list[int]] = [[] for _ in self.parameters]
        for part in self.parts:
            for piece in part.pieces:
                self.parts_of_parameter[piece.tensor].append(part.index)
        places = {parameter: index for index, parameter in enumerate(self.parameters)}
        self._owners = [
            (places[parameter], module, name)
            for module in model.modules()
            for name, parameter in module._parameters.items()
            if parameter in places
        ]
        self._versions: list[int] = []
        self.note()
        self._home: Vector | None = None
        self._addresses: list[int] = []
        if optimizer is not None:
            self._settle()

    @property
    def total(self) -> int:
        """How many values travel."""
        return sum(part.size for part in self.parts)

    def of(self, part: Part) -> list[nn.Parameter]:
        """The parameter of each piece of a part."""
        return [self.parameters[piece.tensor] for piece in part.pieces]

    def device_of(self, part: Part) -> torch.device | None:
        """The device on which a part may be coded: all of it lies there."""
        return None if self.is_on_host(part) else common_device(self.of(part))

    def is_on_host(self, part: Part) -> bool:
        """Whether no parameter of a part lies on a device that could code it."""
        return all(self.parameters[piece.tensor].device.type not in device.KINDS for piece in part.pieces)

    def refuse_converted(self) -> None:
        """Raise if the script has made parameters of something else: shards round to what they know."""
        for parameter, tensor in zip(self.parameters, self.tensors, strict=True):
            if _name(parameter.dtype) != tensor.dtype:
                raise UsageError(
                    f"parameter `{tensor.name}` is {parameter.dtype} now, and was torch.{tensor.dtype} when "
                    "the model was wrapped",
                    hint="convert the model (`.bfloat16()`, `.double()`, `.to(dtype)`) before `wrap`",
                )

    def home(self, part: Part) -> Vector | None:
        """The memory of a part's parameters, if they lie there in one run."""
        if self._home is None:
            return None
        for piece in part.pieces:
            if self.parameters[piece.tensor].data_ptr() != self._addresses[piece.tensor]:
                return None  # the model has been moved since
        return self._home[self._starts[part.index] : self._starts[part.index + 1]]

    def read(self, part: Part, memory: Vector | None = None) -> Vector:
        """Copy the parameters of a part, into the memory given or into its own."""
        flat: Vector = np.empty(part.size, np.float32) if memory is None else memory
        for (start, stop), piece in zip(_places(part), part.pieces, strict=True):
            values = _flat(self.parameters[piece.tensor])[piece.start : piece.stop]
            torch.from_numpy(flat[start:stop]).copy_(values)
        return flat

    def read_gradient(
        self, part: Part, memory: Vector | None, feedback: Vector | None, factor: float = 1.0
    ) -> tuple[Vector, NDArray[np.bool_]]:
        """Copy the gradient of a part, zero where there is none, and say which pieces have one.

        It is multiplied by the factor, and the feedback, where given, is added, both on the way.
        """
        gradients = [self.parameters[piece.tensor].grad for piece in part.pieces]
        used = np.array([gradient is not None for gradient in gradients])
        flat: Vector = np.empty(part.size, np.float32) if memory is None else memory
        for (start, stop), piece, gradient in zip(_places(part), part.pieces, gradients, strict=True):
            if gradient is None:
                flat[start:stop] = 0 if feedback is None else feedback[start:stop]
                continue
            dense = gradient.to_dense() if gradient.is_sparse else gradient
            values, own = _flat(dense)[piece.start : piece.stop], torch.from_numpy(flat[start:stop])
            if factor != 1:
                values = values.float() * factor
            if feedback is None:
                own.copy_(values)
            else:
                # Not `torch.from_numpy(feedback)`: it is read-only, which torch does not know.
                np.add(feedback[start:stop], values.cpu().float().numpy(), out=flat[start:stop])
        return flat, used

    def gather(self, part: Part) -> Tensor:
        """Copy the parameters of a part into one vector on their device."""
        values = [_flat(parameter) for parameter in self.of(part)]
        return torch.cat(_cut(part, values)).float()

    def gather_gradient(
        self, part: Part, feedback: Tensor | None, factor: float = 1.0
    ) -> tuple[Tensor, NDArray[np.bool_]]:
        """Do what `read_gradient` does, on the device of the parameters."""
        gradients = [parameter.grad for parameter in self.of(part)]
        used = np.array([gradient is not None for gradient in gradients])
        pieces = []
        for piece, parameter, gradient in zip(part.pieces, self.of(part), gradients, strict=True):
            if gradient is None:
                pieces.append(parameter.new_zeros(piece.size))
            else:
                dense = gradient.to_dense() if gradient.is_sparse else gradient
                pieces.append(_flat(dense)[piece.start : piece.stop])
        flat = torch.cat(pieces).float()
        if factor != 1:
            flat.mul_(factor)
        return (flat if feedback is None else flat.add_(feedback)), used

    def expect(self, part: Part, used: bytes) -> None:
        """Nothing to do: shards have left unused parameters as they were."""

    def checksums(self, part: Part) -> bytes:
        """A checksum of each piece of a part; nothing where they are too many to be sent."""
        if 4 * len(part.pieces) > CHECKSUMS_LIMIT:
            return b""
        home = self.home(part)
        return checksums_of(self.read(part) if home is None else home, part)

    def note(self) -> None:
        """Remember the parameters as they are now: written by rounds, not by the script."""
        self._versions = [parameter._version for parameter in self.parameters]

    def changed(self) -> list[int]:
        """The parameters that were changed in place since `note`; raise if one was replaced."""
        for index, module, name in self._owners:
            own = module._parameters.get(name)
            if own is not None and own is not self.parameters[index]:
                raise UsageError(
                    f"parameter `{self.tensors[index].name}` was replaced by another one after `wrap`",
                    hint="give parameters new values and keep them: `load_state_dict` without `assign=True`; "
                    "or wrap the model after that",
                )
        return [
            index
            for index, (parameter, version) in enumerate(zip(self.parameters, self._versions, strict=True))
            if parameter._version != version
        ]

    def write(self, part: Part, values: Vector | Tensor) -> None:
        """Set the parameters of a part; float32 is rounded to what they are made of."""
        home = self.home(part)
        if home is not None:
            home[:] = values
            return
        with torch.no_grad():
            for own, new in self._pairs(part, values):
                own.copy_(new)

    @contextlib.contextmanager
    def on_host(self, part: Part) -> Iterator[Vector]:
        """Give the parameters of a part to be changed: they themselves, or a copy that is put back."""
        home = self.home(part)
        if home is not None:
            yield home
            return
        copy = self.read(part, room("answered", part.size, np.float32)[: part.size])
        yield copy
        self.write(part, copy)

    @contextlib.contextmanager
    def on_device(self, part: Part) -> Iterator[Tensor]:
        """Do what `on_host` does, on the device of the parameters."""
        first, piece = self.parameters[part.pieces[0].tensor].detach(), part.pieces[0]
        if len(part.pieces) == 1 and first.is_contiguous() and first.dtype == torch.float32:
            yield first.view(-1)[piece.start : piece.stop]
            return
        copy = self.gather(part)
        yield copy
        self.write(part, copy)

    def _settle(self) -> None:
        """Lay the parameters end to end in memory, where they are contiguous float32 on the CPU.

        Then a part is one run, and answers are decoded straight onto it.
        """
        self._starts = [0, *itertools.accumulate(part.size for part in self.parts)]
        if not all(
            p.device.type == "cpu" and p.dtype == torch.float32 and p.is_contiguous() for p in self.parameters
        ):
            return
        flat = torch.empty(self.total, dtype=torch.float32)
        start = 0
        for parameter in self.parameters:
            own = flat[start : start + parameter.numel()].view(parameter.shape)
            own.copy_(parameter.detach())
            parameter.data = own
            self._addresses.append(parameter.data_ptr())
            start += parameter.numel()
        self._home = flat.numpy()

    def is_finite(self) -> bool:
        """Whether no parameter holds NaN or infinity."""
        sums = [parameter.detach().sum() for parameter in self.parameters]
        if bool(torch.stack([own.to(sums[0].device) for own in sums]).isfinite().all()):
            return True
        return all(bool(parameter.detach().isfinite().all()) for parameter in self.parameters)

    def digest(self) -> str:
        """A hash of all trained parameters, equal on replicas that hold the same bits."""
        digest = hashlib.sha256()
        for parameter in self.parameters:
            digest.update(_flat(parameter).cpu().contiguous().view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def _pairs(self, part: Part, values: Vector | Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Each piece of a part as a writable view of its parameter, with its values beside it."""
        if isinstance(values, Tensor):
            flat = values
        else:  # torch warns of memory that it may not write to, though it only reads this
            flat = torch.from_numpy(values if values.flags.writeable else values.copy())
        for (start, stop), piece in zip(_places(part), part.pieces, strict=True):
            parameter = self.parameters[piece.tensor].detach()
            new = flat[start:stop].to(parameter.device)
            if parameter.is_contiguous():
                yield parameter.view(-1)[piece.start : piece.stop], new
            else:  # e.g. channels last: change a copy in the order of the shape, then write it back
                copy = parameter.reshape(-1)
                yield copy[piece.start : piece.stop], new
                parameter.copy_(copy.view(parameter.shape))


def _places(part: Part) -> list[tuple[int, int]]:
    offsets = part.layout.offsets
    return list(itertools.pairwise(offsets))


def _cut(part: Part, values: list[Tensor]) -> list[Tensor]:
    return [own[piece.start : piece.stop] for piece, own in zip(part.pieces, values, strict=True)]


def _flat(tensor: Tensor) -> Tensor:
    """The values in the order of the shape; a view where memory has that order."""
    return tensor.detach().reshape(-1)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check(
    parameters: list[nn.Parameter],
    named: dict[nn.Parameter, str],
    groups: dict[Tensor, int],
    *,
    takes_float64: bool,
) -> None:
    for parameter in groups:
        if parameter.requires_grad and parameter not in named:
            raise UsageError(
                f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that the model lacks",
                hint="give `wrap` the model whose parameters the optimizer was made with",
            )
    for parameter, name in named.items():
        if parameter not in groups:
            raise UsageError(
                f"the optimizer does not hold parameter `{name}`",
                hint="make the optimizer with `model.parameters()`, or freeze it: `requires_grad_(False)`",
            )
    for parameter in parameters:
        dtype = _name(parameter.dtype)
        if dtype == "float64" and not takes_float64:
            raise UsageError(
                f"parameter `{named[parameter]}` is torch.float64, and shards update in float32",
                hint="`model.float()`; or `model = shoestring.wrap(model)`, which leaves the update to "
                "the worker and rounds nothing but gradients",
            )
        if dtype not in DTYPES:
            raise UsageError(
                f"parameter `{named[parameter]}` is {parameter.dtype}, expected one of {', '.join(DTYPES)}",
                hint=_CURES.get(dtype, "freeze it with `requires_grad_(False)`, or train it in bfloat16"),
            )
    if not parameters:
        raise UsageError("the model has no trainable parameters", hint="check `requires_grad`")
