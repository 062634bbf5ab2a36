"""Equal batches have equal fingerprints, however they lie; others differ."""

from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from shoestring.worker.module.fingerprint import TENSOR_BYTES, fingerprint


def of(*args: Any, **kwargs: Any) -> int:
    return fingerprint(args, kwargs)


@dataclass
class Pair:
    x: torch.Tensor
    y: Any = None


class Encoding(UserDict[str, Any]):
    """What tokenizers return."""


class Graph:
    """Keys and items, and no mapping."""

    def __init__(self, **parts: Any) -> None:
        self.parts = parts

    def keys(self) -> list[str]:
        return list(self.parts)

    def __getitem__(self, key: str) -> Any:
        return self.parts[key]

    def __iter__(self) -> Any:
        raise AssertionError("iterates over something else")


Named = namedtuple("Named", "x y")

X = torch.arange(12.0).reshape(3, 4)
WRAPPINGS: dict[str, Callable[[torch.Tensor], tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "argument": lambda x: ((x,), {}),
    "keyword": lambda x: ((), {"x": x}),
    "with text": lambda x: (("text", None, 3, x), {"flag": True}),
    "tuple": lambda x: (((x, 1),), {}),
    "named tuple": lambda x: ((Named(x, 2),), {}),
    "lists in lists": lambda x: (([[1, [x]]],), {}),
    "dictionary": lambda x: (({"x": x, "y": [1]},), {}),
    "ordered dictionary": lambda x: ((OrderedDict(x=x),), {}),
    "dataclass": lambda x: ((Pair(x),), {}),
    "dataclass in a dataclass": lambda x: ((Pair(torch.ones(2), {"z": Pair(x)}),), {}),
    "encoding": lambda x: ((Encoding(input_ids=x),), {}),
    "graph": lambda x: ((Graph(x=x),), {}),
}


@pytest.mark.parametrize("name", WRAPPINGS)
def test_tensors_are_found_wherever_they_lie(name: str) -> None:
    wrap = WRAPPINGS[name]
    first = fingerprint(*wrap(X))
    assert 0 < first < 1 << 63
    assert fingerprint(*wrap(X.clone())) == first
    assert fingerprint(*wrap(X + 1)) != first


@pytest.mark.parametrize(
    "args", [(), (1, "text", None, b"x"), ([], {}, ()), (Pair, torch.nn.Linear(2, 2)), (iter([X]),)]
)
def test_without_a_tensor_it_is_zero(args: tuple[Any, ...]) -> None:
    assert fingerprint(args, {}) == 0


@pytest.mark.parametrize(
    "tensor",
    [torch.empty(0), torch.empty(3, 0, 2), torch.empty(5, device="meta")],
    ids=["empty", "empty rows", "meta"],
)
def test_a_tensor_without_values_does_not_count(tensor: torch.Tensor) -> None:
    assert of(tensor) == 0
    assert of(tensor, X) == of(X)


DTYPES = [
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16,
    torch.int8, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_type(dtype: torch.dtype) -> None:
    values = torch.tensor([[0, 1, 0], [1, 1, 0]]).to(dtype)
    found = of(values)
    assert found > 0
    assert of(values.clone()) == found
    assert of(torch.tensor([[0, 1, 0], [1, 1, 1]]).to(dtype)) != found
    assert of(torch.tensor(1).to(dtype)) > 0  # no dimension


def test_type_shape_and_place_count() -> None:
    zeros = torch.zeros(4, 3)
    different = [
        of(zeros), of(zeros.T), of(zeros.int()), of(zeros, zeros), of(torch.zeros(12)), of(torch.zeros(5, 3)),
        of(zeros, X), of(X, zeros),
    ]  # fmt: skip
    assert len(set(different)) == len(different)


def test_how_a_tensor_lies_in_memory_does_not_count() -> None:
    images = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    assert of(images.to(memory_format=torch.channels_last)) == of(images)
    assert of(images.repeat(1, 2, 1, 1)[:, :3]) == of(images)
    assert of(images.requires_grad_()) == of(images.detach())
    complex_ = torch.view_as_complex(torch.randn(4, 2))
    assert of(complex_.conj()) == of(complex_.conj().clone().resolve_conj())
    assert of(complex_.conj()) != of(complex_)


@pytest.mark.parametrize("shape", [(1 << 20,), (4096, 256), (2, 1 << 19), (1, 1, 1 << 20), (3, 700, 500)])
def test_of_a_large_tensor_the_first_rows_count(shape: tuple[int, ...]) -> None:
    tensor = torch.zeros(shape)
    before = of(tensor)
    tensor.view(-1)[-1] = 1
    assert of(tensor) == before
    tensor.view(-1)[TENSOR_BYTES // 8] = 1  # of 4 bytes each: within the first half
    assert of(tensor) != before
    assert of(tensor.bfloat16()) != before


def test_sparse_and_nested_tensors() -> None:
    for make in (
        lambda x: x.to_sparse(),
        lambda x: x.to_sparse_csr(),
        lambda x: torch.nested.nested_tensor([x, x[:2]], layout=torch.jagged),
        lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
    ):
        assert of(make(X)) == of(make(X.clone())) > 0
        assert of(make(X)) != of(make(X + 1))
    ones = torch.eye(5).bool()
    for make in (lambda x: x.to_sparse(), lambda x: x.to_sparse_csc()):
        assert of(make(ones)) != of(make(ones.flip(0)))


def test_much_of_anything_is_looked_at_only_so_far() -> None:
    deep: Any = X
    for _ in range(100):
        deep = [deep]
    assert of(deep) == 0
    assert of(X, range(10**9), list(range(100_000))) == of(X)
    many = [torch.tensor(float(number)) for number in range(500)]
    assert of(many) == of(many[:64])
    cycle: list[Any] = []
    cycle += [cycle] * 50
    assert of(cycle) == 0
    assert of(X, cycle) == of(X)
