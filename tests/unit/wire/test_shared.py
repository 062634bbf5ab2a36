"""Memory that two processes share: the right file, the right size, nothing left behind."""

import os

import numpy as np

from shoestring.wire.shared import FOLDER, Segment

SIZES = [5, 0, 7]


def test_what_one_side_writes_the_other_reads() -> None:
    own = Segment.create(SIZES)
    assert own is not None
    theirs = Segment.open(own.name, SIZES)
    assert theirs is not None
    own.unlink()
    assert not (FOLDER / own.name).exists()
    assert own.reserve(1)
    for slot in (0, 1):
        for place, size in enumerate(SIZES):
            own.slot(place, slot)[:] = 100 * slot + place
            want = np.full(size, 100 * slot + place, np.float32)
            np.testing.assert_array_equal(theirs.slot(place, slot), want)
    assert not theirs.slot(0, 0).flags.writeable
    own.close()


def test_what_is_not_a_segment_of_ours_is_not_opened() -> None:
    own = Segment.create(SIZES)
    assert own is not None
    assert Segment.open(own.name, [5, 0, 8]) is None
    assert Segment.open(f"../{own.name}", SIZES) is None
    assert Segment.open("/etc/passwd", SIZES) is None
    link = FOLDER / ("shoestring-" + "0" * 32)
    os.symlink(FOLDER / own.name, link)
    try:
        assert Segment.open(link.name, SIZES) is None
    finally:
        link.unlink()
    own.close()
    assert Segment.open(own.name, SIZES) is None


def test_without_values_there_is_nothing_to_share() -> None:
    assert Segment.create([]) is None
    assert Segment.create([0]) is None
