"""A shard's file of a checkpoint: whole, once, or reported as not written."""

import msgspec
import numpy as np

from shoestring.checkpoint.shard import ShardWriter
from shoestring.checkpoint.snapshot import FileRecord, step_folder
from shoestring.checkpoint.tensorfile import TensorFile
from tests.unit.checkpoint.parts import MARKS, Written, make_part

PARTS = [make_part(0), make_part(1, has_feedback=False, digest="abc")]


def capture(writer: ShardWriter, seq: int, part: int) -> None:
    writer.capture(seq, PARTS[part], MARKS, PARTS)


def test_a_file_holds_all_parts_as_they_were(tmp_path):
    parts = [make_part(0), make_part(1)]
    want = {name: array.copy() for part in parts for name, array in part.tensors().items()}
    writer = ShardWriter(tmp_path, 2)
    written = Written(writer)
    for part in parts:
        writer.capture(7, part, MARKS, parts)
        part.params[:] = 0  # the next round
    seq, encoded, why = written.wait()
    writer.close()
    record = msgspec.json.decode(encoded, type=FileRecord)
    assert (seq, why, record.name) == (7, "", "shard-2.safetensors")
    marks = {"version": 5, "round": 3, "has_kept": True, "ledger": {"0": [1, 3], "1": [2, 3]}}
    assert record.facts == {"parts": {"0": marks, "1": marks}}
    file = TensorFile(step_folder(tmp_path, 7) / record.name, record)
    assert file.entries.keys() == want.keys()
    for name, values in want.items():
        np.testing.assert_array_equal(file.read(name), values)


def test_a_part_that_is_saved_twice_is_written_once(tmp_path):
    """Workers that do not wait for each other reach the round of a checkpoint one after the other."""
    writer = ShardWriter(tmp_path, 0)
    written = Written(writer)
    for part in (0, 0, 1, 1, 0):
        capture(writer, 7, part)
    writer.close()
    assert [(seq, why) for seq, _, why in written.reports] == [(7, "")]
    assert [path.name for path in step_folder(tmp_path, 7).iterdir()] == ["shard-0.safetensors"]


def test_a_file_that_cannot_be_written_is_reported_once_and_the_next_one_is(tmp_path):
    step_folder(tmp_path, 1).write_bytes(b"in the way")
    writer = ShardWriter(tmp_path, 0)
    written = Written(writer)
    for seq in (1, 2):
        for part in (0, 1):
            capture(writer, seq, part)
    writer.close()
    assert [(seq, record is None) for seq, record, _ in written.reports] == [(1, True), (2, False)]
    assert "step-000000001" in written.reports[0][2]


def test_what_is_not_complete_leaves_no_file(tmp_path):
    writer = ShardWriter(tmp_path, 0)
    capture(writer, 1, 0)
    writer.close()
    assert list(step_folder(tmp_path, 1).iterdir()) == []


def test_files_that_lack_a_part_for_long_are_given_up(tmp_path):
    writer = ShardWriter(tmp_path, 0)
    written = Written(writer)
    for seq in range(1, 12):
        capture(writer, seq, 0)
    capture(writer, 1, 1)
    capture(writer, 11, 1)
    writer.close()
    given_up = [(seq, None, "some of its parts never came") for seq in (1, 2, 3)]
    assert [report for report in written.reports if report[1] is None] == given_up
    assert [seq for seq, record, _ in written.reports if record is not None] == [11]
    assert not any(path.name.endswith(".partial") for path in tmp_path.rglob("*"))
