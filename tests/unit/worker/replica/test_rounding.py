"""torch's rounding and that of shards give the same bits."""

import numpy as np
import pytest
import torch

from shoestring.model.parts import cut
from shoestring.model.precision import NARROW, Precision, to_bits
from shoestring.worker.replica.rounding import rounded
from tests.unit.model.test_precision import neighbours

(PART,) = cut([(40, 30), (17,), (), (200,)])


@pytest.mark.parametrize("dtype", NARROW)
def test_torch_rounds_as_shards_do(dtype):
    values = neighbours(dtype)
    want = to_bits(values, dtype).view(np.int16)
    kind: torch.dtype = getattr(torch, dtype)
    np.testing.assert_array_equal(torch.from_numpy(values).to(kind).view(torch.int16).numpy(), want)
    # One by one and with gaps, as a parameter that is not contiguous is written.
    gaps = torch.empty(values.size, 3, dtype=kind)
    gaps[:, 1].copy_(torch.from_numpy(values))
    np.testing.assert_array_equal(gaps[:, 1].clone().view(torch.int16).numpy(), want)


@pytest.mark.parametrize(
    "dtypes", [("bfloat16",) * 4, ("float16", "float32", "bfloat16", "float64"), ("float32",) * 4]
)
def test_a_part_is_rounded_as_its_shard_rounds_it(dtypes):
    precision = Precision(PART, dtypes)
    values = np.random.default_rng(1).standard_normal(PART.size).astype(np.float32)
    before = torch.from_numpy(values.copy())
    found = rounded(before, precision)
    precision.round(values)
    assert found.numpy().tobytes() == values.tobytes()
    assert (found is before) != precision.is_narrow
