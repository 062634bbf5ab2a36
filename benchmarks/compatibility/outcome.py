"""What one worker tells of a case: values in a safetensors file, and a text about the rest.

Every value belongs to a kind, the first word of its name:

- `shared`: parameters and what else all workers must hold with the same bits
- `state`: of an optimizer
- `first`: of the first worker alone, as DDP's buffers are
- `own`: of each worker, as the losses of its own batches are
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

SHARED, STATE, FIRST, OWN = "shared", "state", "first", "own"
AGREED = f"{SHARED}.agreed"  # in some round of local steps, whose number follows


class Error(msgspec.Struct, frozen=True):
    """What ended a case."""

    kind: str
    message: str
    hint: str = ""
    is_refusal: bool = False  # a `ShoestringError` with a hint that is about the script
    traceback: str = ""


class Facts(msgspec.Struct, frozen=True):
    """What is no tensor."""

    losses: list[float | None] = []
    moved: float | None = 0.0  # the furthest that a parameter went since it was wrapped
    error: Error | None = None


@dataclass(frozen=True)
class Outcome:
    """How a case went on one worker."""

    facts: Facts
    values: dict[str, Tensor] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Write both files; the one that `read` looks for comes last."""
        save_file(self.values, path.with_suffix(".safetensors"))
        part = path.with_suffix(".part")
        part.write_bytes(msgspec.json.encode(self.facts))
        part.replace(path.with_suffix(".json"))

    @classmethod
    def read(cls, path: Path) -> "Outcome | None":
        """Read what `write` wrote; none if it never did."""
        text = path.with_suffix(".json")
        if not text.exists():
            return None
        facts = msgspec.json.decode(text.read_bytes(), type=Facts)
        return cls(facts, load_file(path.with_suffix(".safetensors")))


def flatten(found: Mapping[str, Any]) -> dict[str, Tensor]:
    """Name every tensor and number of what a script returned."""
    values: dict[str, Tensor] = {}
    for key, value in found.items():
        if isinstance(value, nn.Module):
            for name, parameter in value.named_parameters():
                values[f"{SHARED}.{key}.{name}"] = _copy(parameter)
            for name, buffer in value.named_buffers():
                values[f"{FIRST}.{key}.{name}"] = _copy(buffer)
        elif hasattr(value, "state_dict"):
            values |= {f"{STATE}.{key}.{name}": one for name, one in _numbers(value.state_dict())}
        else:
            kind = "" if key.startswith((f"{SHARED}.", f"{FIRST}.", f"{STATE}.")) else f"{OWN}."
            numbers = _numbers(value)
            values |= {f"{kind}{key}.{name}" if name else f"{kind}{key}": one for name, one in numbers}
    return values


def _numbers(value: Any, name: str = "") -> list[tuple[str, Tensor]]:
    """Every tensor and number in dicts and lists, by its path."""
    if isinstance(value, Tensor):
        return [(name, _copy(value))]
    if isinstance(value, bool | int | float):
        return [(name, torch.tensor(value, dtype=torch.float64))]
    if isinstance(value, Mapping):
        inner = value.items()
    elif isinstance(value, list | tuple):
        inner = dict(enumerate(value)).items()
    else:
        return []
    return [one for key, each in inner for one in _numbers(each, f"{name}.{key}" if name else str(key))]


def _copy(value: Tensor) -> Tensor:
    value = value.detach()
    if value.layout != torch.strided:
        value = value.to_dense()
    if value.is_complex():
        value = torch.view_as_real(value)
    return value.clone(memory_format=torch.contiguous_format)
