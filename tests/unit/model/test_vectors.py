"""The vectors of a part as one payload. What is refused: tests/unit/server/test_shard_values.py."""

import google_crc32c
import numpy as np

from shoestring.model.parts import cut, is_flagged, pack_flags
from shoestring.model.rules import Rule
from shoestring.model.vectors import checksums_of, pack, state_names, unpack

PART = cut([(3, 4), (0, 5), (2,)])[0]


def test_what_is_packed_comes_back():
    rule = Rule("adamw", amsgrad=True)
    names = ("params", *state_names(rule))
    assert names == ("params", "steps", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    vectors = {name: np.random.default_rng(0).standard_normal(PART.size, np.float32) for name in names}
    vectors["steps"] = np.arange(len(PART.pieces))
    found = unpack(names, pack(vectors), PART, rule)
    for name in names:
        np.testing.assert_array_equal(found[name], vectors[name])
    assert unpack((), pack({}), PART, rule) == {}


def test_each_piece_has_a_checksum():
    values = np.arange(PART.size, dtype=np.float32)
    pieces = [
        (start, start + piece.size) for start, piece in zip(PART.layout.offsets, PART.pieces, strict=False)
    ]
    want = [google_crc32c.value(values[start:stop].tobytes()) for start, stop in pieces]
    assert np.frombuffer(checksums_of(values, PART), "<u4").tolist() == want


def test_flags_of_parts_travel_as_bits():
    assert pack_flags(np.zeros(20, bool)) == b""
    for count in (1, 7, 8, 9, 100):
        flags = np.random.default_rng(count).random(count) < 0.5
        flags[-1] = True
        packed = pack_flags(flags)
        assert [is_flagged(packed, index) for index in range(count)] == flags.tolist()
    assert not is_flagged(b"\xff", 8)
    assert not is_flagged(b"", 0)
