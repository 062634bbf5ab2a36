"""How codec tests compare."""

from collections.abc import Callable

import numpy as np
import pytest

from shoestring.codec.base import Vector


@pytest.fixture
def same_bits() -> Callable[[Vector, Vector], None]:
    """Assert that two vectors are equal bit for bit, so that -0.0 is not 0.0."""

    def check(found: Vector, expected: Vector) -> None:
        assert found.dtype == expected.dtype == np.float32
        np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))

    return check
