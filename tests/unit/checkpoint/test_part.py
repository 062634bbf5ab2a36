"""One part of a checkpoint: its tensors' names, and what is refused when it is restored."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from shoestring.checkpoint.part import PartMarks, PartValues, SavedParts
from shoestring.checkpoint.shard import ShardWriter
from shoestring.checkpoint.snapshot import FileRecord, Manifest, Snapshot, commit, step_folder
from shoestring.errors import SnapshotError
from tests.unit.checkpoint.parts import MARKS, Written, make_part


def saved(tmp_path, parts: list[PartValues], change=lambda marks: None) -> SavedParts:
    """Parts of a checkpoint whose marks were changed by hand."""
    writer = ShardWriter(tmp_path, 0)
    written = Written(writer)
    for part in parts:
        writer.capture(1, part, MARKS, parts)
    record = msgspec.json.decode(written.wait()[1])
    writer.close()
    change(record["facts"]["parts"])
    folder = step_folder(tmp_path, 1)
    file = msgspec.convert(record, FileRecord)
    commit(folder, Manifest(step=1, workers=1, shards=1, facts={}, files=[file]))
    return SavedParts(Snapshot(folder))


def test_tensors_have_the_names_that_checkpoints_have_had_all_along():
    assert list(make_part(1, digest="abc").tensors()) == [
        "part.00001.params",
        "part.00001.kept",
        "part.00001.steps",
        "part.00001.state.momentum",
        "part.00001.statistics.abc",
    ]


def test_what_workers_hold_takes_the_place_of_feedback_where_it_is_less_precise(tmp_path):
    part = replace(make_part(1, has_feedback=False), held=np.arange(7, dtype=np.float32))
    assert list(part.tensors()) == [
        "part.00001.params",
        "part.00001.held",
        "part.00001.steps",
        "part.00001.state.momentum",
    ]
    again = replace(make_part(1, seed=1, has_feedback=False), held=np.zeros(7, np.float32))
    saved(tmp_path, [part]).fill(again)
    for name, values in part.tensors().items():
        np.testing.assert_array_equal(again.tensors()[name], values)


def test_without_feedback_there_are_zeros_in_its_place():
    assert not make_part(0, has_feedback=False).tensors()["part.00000.kept"].any()


def test_a_part_comes_back(tmp_path):
    parts = [make_part(0, digest="abc"), make_part(1)]
    found = saved(tmp_path, parts)
    again = make_part(0, seed=1, digest="abc")
    found.fill(again)
    for name, values in parts[0].tensors().items():
        np.testing.assert_array_equal(again.tensors()[name], values)
    assert found.marks(0) == MARKS


def test_statistics_of_other_layers_begin_anew(tmp_path):
    found = saved(tmp_path, [make_part(0, digest="abc")])
    other = make_part(0, seed=1, digest="other")
    before = other.statistics["other"].copy()
    found.fill(other)
    np.testing.assert_array_equal(other.statistics["other"], before)


@pytest.mark.parametrize(
    "change",
    [
        lambda parts: parts.pop("0"),
        lambda parts: parts["0"].pop("ledger"),
        lambda parts: parts["0"].update(ledger={"x": [1, 2]}),
        lambda parts: parts["0"].update(ledger={"0": [1]}),
        lambda parts: parts["0"].update(ledger={"0": ["1", "2"]}),
        lambda parts: parts["0"].update(round="3"),
        lambda parts: parts.update({"0": []}),
    ],
)
def test_marks_that_do_not_fit_are_refused(tmp_path, change):
    found = saved(tmp_path, [make_part(0), make_part(1)], change)
    assert found.marks(1) == PartMarks(5, 3, True, {"0": (1, 3), "1": (2, 3)})
    with pytest.raises(SnapshotError, match="part 0"):
        found.marks(0)


def test_a_part_of_another_size_is_refused_before_any_of_it_has_changed(tmp_path):
    found = saved(tmp_path, [make_part(0)])
    other = make_part(1)
    misfit = PartValues(0, other.params, other.feedback, other.steps, other.optimizer)
    before = other.params.copy()
    with pytest.raises(SnapshotError, match="expected"):
        found.fill(misfit)
    np.testing.assert_array_equal(other.params, before)
