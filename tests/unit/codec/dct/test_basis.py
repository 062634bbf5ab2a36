"""The integer basis is the DCT, nearly orthogonal, and never changes."""

import hashlib

import numpy as np
import scipy.fft

from shoestring.codec.dct.basis import BASIS_SCALE, integer_basis
from shoestring.codec.dct.format import BLOCKS
from shoestring.codec.dct.reference import cosine_basis
from tests.unit.codec.cases import for_each


def exact(n: int) -> np.ndarray:
    return scipy.fft.dct(np.eye(n), norm="ortho", axis=0)


@for_each("n", BLOCKS)
def test_basis_is_the_rounded_cosine_transform(n):
    np.testing.assert_array_equal(integer_basis(n), np.rint(BASIS_SCALE * exact(n)))


@for_each("n", BLOCKS)
def test_no_entry_is_near_a_tie(n):
    """So that no cosine function of any machine can round an entry the other way."""
    from_tie = np.abs(np.abs(BASIS_SCALE * exact(n)) % 1 - 0.5)
    assert from_tie.min() > 1e-3


@for_each("n", BLOCKS)
def test_rows_are_orthogonal(n):
    """To 0.6 %; the first row of 32 x 32, 90.51 rounded to 91 throughout, is 1.1 % too long."""
    basis = integer_basis(n).astype(np.float64) / BASIS_SCALE
    assert np.abs(basis @ basis.T - np.eye(n)).max() < (0.011 if n == 32 else 0.006)


@for_each("n", BLOCKS)
def test_reference_forward_basis_is_the_cosine_transform(n):
    np.testing.assert_allclose(cosine_basis(n), exact(n), rtol=0, atol=n * np.finfo(np.float64).eps)


def test_basis_is_frozen():
    digest = hashlib.sha256()
    for n in BLOCKS:
        digest.update(integer_basis(n).astype("<i4").tobytes())
    assert digest.hexdigest() == "3b67154fbcf5b915b3638d618f1dbe87251c13c6bf9d22d677c7669eda7bba4e"


def test_basis_is_read_only():
    assert not integer_basis(8).flags.writeable
