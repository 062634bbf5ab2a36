"""The probability tables are whole, cover every value once, and never change."""

import hashlib

import numpy as np

from shoestring.codec.dct.tables import COST, CUM, EXTRA, FREQ, SLOT, START, SYMBOLS, TABLES, TAILS
from tests.unit.codec.cases import for_each


def test_every_row_sums_to_4096_and_can_code_every_symbol():
    assert FREQ.shape == (TABLES, SYMBOLS)
    np.testing.assert_array_equal(FREQ.sum(axis=1), 4096)
    assert FREQ.min() >= 1


def test_chunk_headers_can_name_every_table():
    assert TABLES <= 1 << 7


def test_slots_and_sums_follow_from_frequencies():
    np.testing.assert_array_equal(CUM[:, 0], 0)
    np.testing.assert_array_equal(CUM[:, 1:] - CUM[:, :-1], FREQ[:, :-1])
    for table in range(TABLES):
        np.testing.assert_array_equal(np.bincount(SLOT[table], minlength=SYMBOLS), FREQ[table])
        assert (np.diff(SLOT[table].astype(int)) >= 0).all()


def test_symbols_cover_every_value_exactly_once():
    ends = START + (1 << EXTRA.astype(np.int64))
    np.testing.assert_array_equal(ends[:-1], START[1:])
    assert START[0] == 0
    assert ends[-1] == 1 << 18


def test_tables_grow_heavier_with_scale():
    """Within one tail a larger scale means larger values: zero becomes rarer, but for rounding."""
    zero = FREQ[:, 0].astype(int).reshape(len(TAILS), -1)
    assert (np.diff(zero, axis=1) <= 0).all()


def test_costs_are_those_of_the_frequencies():
    np.testing.assert_allclose(COST / 256, 12 - np.log2(FREQ), rtol=0, atol=0.5 / 256)


@for_each(
    ("array", "digest"),
    [
        (FREQ.astype("<u4"), "e63b8d31afaaaf90901b43303de2077a9584cb5332f48ae4e6c850bfd04cd435"),
        (START.astype("<i4"), "ab1a51b79fb4c078d53d10834da0b84cc1e60753ae869771605870d5351e50e5"),
        (EXTRA.astype("u1"), "65755f99dead5ab5c9a1c9eb75545df40de73f95fa04c59a63fe93bec023f164"),
    ],
)
def test_tables_are_frozen(array, digest):
    assert hashlib.sha256(array.tobytes()).hexdigest() == digest


def test_tables_are_read_only():
    assert not any(array.flags.writeable for array in (FREQ, CUM, SLOT, START, EXTRA, COST))
