"""What goes into bytes comes back: same types, same bits. What cannot is refused, and damage is found."""

import collections
import gc
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoestring.cache import samples
from shoestring.errors import FleetError, UsageError

DTYPES = (
    "bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "float16", "bfloat16", "float32",
    "float64", "complex64", "float8_e4m3fn",
)  # fmt: skip


def same(a, b):
    """Equal in type, and in every bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        bits = [one.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8) for one in (a, b)]
        return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(*bits)
    if isinstance(a, np.ndarray | np.generic):
        return (a.dtype, a.shape) == (b.dtype, b.shape) and a.tobytes() == b.tobytes()
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, float):
        return math.copysign(1, a) == math.copysign(1, b) and (a == b or (a != a and b != b))
    return a == b


PLAIN = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats() | st.text() | st.binary()
ARRAYS = st.tuples(st.sampled_from("?bBhHiIlLefdFD"), st.lists(st.integers(0, 3), max_size=3)).map(
    lambda drawn: np.arange(math.prod(drawn[1])).astype(drawn[0]).reshape(drawn[1])
)
NESTED = st.recursive(
    PLAIN | ARRAYS | ARRAYS.map(lambda a: torch.from_numpy(a.copy())),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text() | st.integers(-9, 9), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(NESTED)
def test_whatever_is_nested_comes_back(sample):
    assert same(samples.decode(samples.encode(sample)), sample)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (3, 5)])
def test_tensors_of_every_dtype_and_shape_come_back(dtype, shape):
    octets = torch.randint(0, 2, (*shape, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    tensor = octets[..., : getattr(torch, dtype).itemsize].contiguous().view(getattr(torch, dtype))[..., 0]
    assert tensor.shape == shape
    assert same(samples.decode(samples.encode(tensor)), tensor)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12).reshape(3, 4)[:, ::2],
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(3, dtype=">i4"),
        np.array(["one", "eleven"]),
        np.array(["2020-01-01"], "datetime64[D]"),
        np.float32(0.1),
        np.int64(-3),
        np.bool_(True),
    ],
    ids=repr,
)
def test_arrays_and_their_scalars_come_back(array):
    assert same(samples.decode(samples.encode(array)), array)


def test_views_and_conjugates_come_back_as_their_values():
    tensor = torch.arange(24).reshape(2, 3, 4)
    assert same(samples.decode(samples.encode(tensor.permute(2, 0, 1)[1:])), tensor.permute(2, 0, 1)[1:])
    turned = torch.tensor([1 + 2j, 3 - 4j]).conj()
    assert same(samples.decode(samples.encode(turned)), turned.resolve_conj())


def test_what_comes_back_may_be_written_to():
    tensor, array = samples.decode(samples.encode((torch.zeros(3), np.zeros(5))))
    tensor += 1
    array += 2
    assert (tensor.sum(), array.sum()) == (3, 10)


Point = collections.namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("sample", "named"),
    [
        ((1, {"a": {1, 2}}), "`sample[1]['a']` is a `builtins.set`"),
        (Point(1, 2), "Point"),
        ([np.array([None])], "`sample[0]` is a `numpy.ndarray`"),
        (np.zeros(2, [("x", "i4")]), "numpy.ndarray"),
        (np.ma.masked_array([1.0]), "MaskedArray"),
        (torch.nn.Parameter(torch.zeros(2)), "Parameter"),
        (torch.zeros(2, requires_grad=True), "with a gradient"),
        (torch.zeros(2, device="meta"), "`meta`"),
        (torch.eye(2).to_sparse(), "sparse"),
        ({(1, 2): 3}, "builtins.dict"),
        (1 << 70, "cannot be cached"),
        ("\ud800", "cannot be cached"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_would_not_come_back_is_refused_by_name(sample, named):
    with pytest.raises(UsageError) as caught:
        samples.encode(sample)
    assert named in caught.value.message


def test_deep_nesting_is_refused():
    sample = 1
    for _ in range(samples.MAX_DEPTH):
        sample = [sample]
    assert same(samples.decode(samples.encode(sample)), sample)
    with pytest.raises(UsageError, match="nested deeper"):
        samples.encode([[sample]])


def test_every_changed_byte_and_every_cut_is_found():
    encoded = samples.encode((torch.arange(5), {"name": "x", "raw": b"abc"}, 1.5))
    for at in range(len(encoded)):
        changed = bytearray(encoded)
        changed[at] ^= 0x10
        with pytest.raises(FleetError, match="damaged"):
            samples.decode(changed)
        with pytest.raises(FleetError, match="damaged"):
            samples.decode(encoded[:at])


def test_reading_leaves_nothing_for_the_garbage_collector():
    encoded = samples.encode((torch.zeros(3), {"a": [np.zeros(2)]}))
    gc.collect()
    for _ in range(5):  # a cycle would keep the buffers of many samples
        samples.decode(encoded)
    assert gc.collect() == 0
