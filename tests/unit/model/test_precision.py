"""Two-byte values: rounded to the nearest, written and read back."""

import numpy as np
import pytest

from shoestring.errors import JoinError, StreamError
from shoestring.model.parts import cut
from shoestring.model.precision import NARROW, Precision, from_bits, round_to, to_bits
from shoestring.model.rules import Rule
from shoestring.model.table import Table, Tensor, check_table, first_difference, precision_of

INFINITY = {"bfloat16": 0x7F80, "float16": 0x7C00}  # its bits: those of all finite numbers are below
(PART,) = cut([(40, 30), (17,), (), (200,)])
DTYPES = ("bfloat16", "float32", "float64", "float16")


def neighbours(dtype: str) -> np.ndarray:
    """All numbers of a dtype, what lies half-way between two, and the float32s next to either."""
    numbers = from_bits(np.arange(INFINITY[dtype], dtype=np.uint16), dtype).astype(np.float64)
    step = numbers[-1] - numbers[-2]
    halves = np.append((numbers[:-1] + numbers[1:]) / 2, min(numbers[-1] + step / 2, 3.4e38))
    exact = np.concatenate([numbers, halves, numbers[-3:] * 4]).clip(0, 3.4e38).astype(np.float32)
    bits = np.unique(np.concatenate([exact.view(np.uint32) + np.uint32(by) for by in (0, 1, 2, 3)]))
    values = (bits - np.uint32(1)).view(np.float32)  # one more, one less, and one that is far from a tie
    values = values[np.isfinite(values)]
    return np.concatenate([values, -values])


def nearest(values: np.ndarray, dtype: str) -> np.ndarray:
    """By the definition: the nearest number, of two the even one; beyond the largest, as if it went on."""
    numbers = from_bits(np.arange(INFINITY[dtype] + 1, dtype=np.uint16), dtype).astype(np.float64)
    numbers[-1] = 2 * numbers[-2] - numbers[-3]
    sizes = np.abs(values).astype(np.float64)
    above = np.searchsorted(numbers, sizes).clip(1, INFINITY[dtype])
    low, high = sizes - numbers[above - 1], numbers[above] - sizes
    takes_high = (high < low) | ((high == low) & (above % 2 == 0))
    bits = np.where(takes_high, above, above - 1).astype(np.uint16)
    return bits | (np.signbit(values).astype(np.uint16) << np.uint16(15))


@pytest.mark.parametrize("dtype", NARROW)
def test_values_go_to_the_nearest_and_ties_to_the_even_one(dtype):
    values = neighbours(dtype)
    assert values.size > 200_000
    bits = to_bits(values, dtype)
    np.testing.assert_array_equal(bits, nearest(values, dtype))
    rounded = values.copy()
    round_to(rounded, dtype)
    np.testing.assert_array_equal(rounded.view(np.uint32), from_bits(bits, dtype).view(np.uint32))
    again = rounded.copy()
    round_to(again, dtype)
    assert again.tobytes() == rounded.tobytes()


@pytest.mark.parametrize("dtype", NARROW)
def test_what_is_not_finite_stays_so(dtype):
    nans = np.array([0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0xFF800001], np.uint32).view(np.float32)
    values = np.array([np.inf, -np.inf, *nans], np.float32)
    round_to(values, dtype)
    assert values[:2].tolist() == [np.inf, -np.inf]
    assert np.isnan(values[2:]).all()


def test_a_part_is_packed_piece_by_piece():
    precision = Precision(PART, DTYPES)
    assert [(run.start, run.stop, run.dtype) for run in precision.runs] == [
        (0, 1200, "bfloat16"),
        (1200, 1217, "float32"),
        (1217, 1218, "float64"),
        (1218, 1418, "float16"),
    ]
    values = np.random.default_rng(0).standard_normal(PART.size).astype(np.float32)
    packed = precision.pack(values)
    assert packed.nbytes == 2 * 1200 + 4 * 17 + 4 + 2 * 200
    found = precision.unpack(packed.data)
    want = values.copy()
    precision.round(want)
    assert found.tobytes() == want.tobytes() != values.tobytes()
    assert want[1200:1218].tobytes() == values[1200:1218].tobytes()
    # Values that were rounded are written as they are; and all of them may come in float32.
    assert precision.pack(want).tobytes() == packed.tobytes()
    assert precision.unpack(values.view(np.uint8).data).tobytes() == values.tobytes()


def test_neighbours_of_one_dtype_are_one_run():
    precision = Precision(PART, ["float16", "float16", "float32", "float32"])
    assert [(run.start, run.stop) for run in precision.runs] == [(0, 1217), (1217, 1418)]
    assert precision.is_narrow
    assert not Precision(PART).is_narrow
    assert not Precision(PART, ["float32", "float64", "float32", "float32"]).is_narrow


@pytest.mark.parametrize("change", [-1, 1, 2])
def test_a_payload_of_another_size_is_refused(change):
    precision = Precision(PART, DTYPES)
    size = precision.pack(np.zeros(PART.size, np.float32)).nbytes + change
    with pytest.raises(StreamError, match="expected|has"):
        precision.unpack(memoryview(bytes(size)))


def table(*dtypes: str) -> Table:
    tensors = tuple(Tensor(f"t{index}", (3,), 0, dtype) for index, dtype in enumerate(dtypes))
    return Table(tensors, Rule("sgd"), 1, 0.0)


def test_a_table_says_what_parameters_are_made_of():
    mine = table("float32", "bfloat16")
    assert first_difference(mine, table("float32", "bfloat16")) == ""
    assert (
        first_difference(mine, table("float32", "float16"))
        == "parameter `t1` is float16, others have bfloat16"
    )
    (part,) = cut([(3,), (3,)])
    assert [run.dtype for run in precision_of(part, mine.tensors).runs] == ["float32", "bfloat16"]
    check_table(mine)
    with pytest.raises(JoinError, match="complex64"):
        check_table(table("float32", "complex64"))
