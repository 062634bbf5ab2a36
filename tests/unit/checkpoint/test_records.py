"""The files of a checkpoint, gathered by a shard."""

import msgspec
import pytest

from shoestring.checkpoint.records import CHECKPOINT_LIMIT, RECORD_LIMIT, Records
from shoestring.errors import WireError

RECORD = b'{"name":"worker-0.safetensors","size":1,"header":"%s","tensors":[],"facts":{}}' % (b"0" * 64)


def test_the_first_shard_waits_for_all_workers_and_reports_once():
    records = Records(waits_for_workers=True)
    records.add_own(4, b'{"own":1}')
    records.add(1, 4, memoryview(RECORD))
    assert records.complete([0, 1]) == []
    records.add(0, 4, memoryview(RECORD))
    [(seq, files)] = records.complete([0, 1])
    assert (seq, len(msgspec.json.decode(files))) == (4, 3)
    assert records.complete([0, 1]) == []
    assert len(records) == 0


def test_other_shards_report_their_own_file_and_take_no_others():
    records = Records(waits_for_workers=False)
    with pytest.raises(WireError):
        records.add(0, 4, memoryview(RECORD))
    records.add_own(4, b"{}")
    assert records.complete([0, 1]) == [(4, b"[{}]")]


def test_only_the_newest_attempts_are_kept():
    records = Records(waits_for_workers=True)
    for seq in range(100):
        records.add_own(seq, b"{}")
    assert len(records) == CHECKPOINT_LIMIT
    assert records.reported(95)[0] == b""  # it was given up, and says why
    assert [seq for seq, _ in records.complete([])] == [96, 97, 98, 99]
    records.add_own(1, b"{}")
    records.give_up(1, "disk full")
    records.give_up(2, "disk full")
    assert len(records) == 0


def test_a_record_that_comes_again_opens_nothing_after_the_report():
    records = Records(waits_for_workers=True)
    records.add_own(4, b"{}")
    records.add(0, 4, memoryview(RECORD))
    assert records.reported(4) is None
    [(_, files)] = records.complete([0])
    records.add(0, 4, memoryview(RECORD))
    records.add_own(4, b"{}")
    assert len(records) == 0
    assert records.reported(4) == (files, "")


def test_a_record_that_comes_after_the_checkpoint_was_given_up_opens_nothing():
    records = Records(waits_for_workers=True)
    records.give_up(4, "disk full")
    records.add(0, 4, memoryview(RECORD))
    assert len(records) == 0
    assert records.reported(4) == (b"", "disk full")


def test_a_record_beyond_the_limit_is_refused():
    with pytest.raises(WireError):
        Records(waits_for_workers=True).add(0, 1, memoryview(bytes(RECORD_LIMIT + 1)))
