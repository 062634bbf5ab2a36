"""A shard's file of a checkpoint, written while rounds go on, and read back on other shards."""

import threading

import msgspec
import numpy as np
import pytest

from shoestring.checkpoint.shard import Archive, restorer
from shoestring.checkpoint.snapshot import FileRecord, Manifest, Snapshot, commit, step_folder
from shoestring.errors import SnapshotError
from shoestring.model.parts import assign
from shoestring.server.holding import Holding
from shoestring.server.shard import Shard
from shoestring.wire import messages as say
from tests.unit.server.talk import EMPTY, PARTS, SGD, Talk, hello_of, push_of, table


class Written:
    """Waits for what an archive reports."""

    def __init__(self, archive: Archive) -> None:
        self.reports: list[tuple[int, bytes | None, str]] = []
        self._came = threading.Semaphore(0)
        archive.on_written = self._take

    def _take(self, seq, record, why):
        self.reports.append((seq, record, why))
        self._came.release()

    def wait(self) -> tuple[int, bytes | None, str]:
        assert self._came.acquire(timeout=30)
        return self.reports[-1]


def finish_all(shard: Shard, archive: Archive) -> None:
    """What the service does: capture between finishing a part and its next work."""
    while (work := shard.next_work()) is not None:
        work.run()
        shard.finish(work)
        if work.is_saved:
            archive.capture(work.seq, work.desk, shard.desks)
    shard.outbox.clear()


def cluster(shards: int, restore=None) -> list[Shard]:
    made = []
    packed = memoryview(msgspec.msgpack.encode(table()))
    for index in range(shards):
        shard = Shard(index, shards, "run", restore=restore or (lambda holding: None))
        for worker in (0, 1):
            hello = hello_of(worker, 2, 1 if restore is None else 2, shard=index, shards=shards)
            shard.handle(b"%d" % worker, hello, packed, 0.0)
        made.append(shard)
    return made


def tell(shards: list[Shard], part: int, worker: int, message, payload=EMPTY) -> None:
    shards[assign(PARTS, len(shards))[part]].handle(b"%d" % worker, message, payload, 0.0)


def begin(shards: list[Shard], first: int) -> None:
    for shard in shards:
        for worker in (0, 1):
            shard.handle(b"%d" % worker, say.Enter(first), EMPTY, 0.0)
    if first == 1:
        for part in PARTS:
            tell(shards, part.index, 0, say.Init(part.index), memoryview(bytes(4 * part.size)))


def train(shards: list[Shard], archives, seqs, life: int, codec: str, saves: int) -> None:
    for seq in seqs:
        for part in PARTS:
            for worker in (1, 0):
                push, payload = push_of(part.index, worker, seq, codec=codec, life=life, save=seq == saves)
                tell(shards, part.index, worker, push, payload)
        for shard, archive in zip(shards, archives, strict=True):
            finish_all(shard, archive)


def holdings(shards: list[Shard]) -> dict[int, tuple]:
    """All of each part, as bytes."""
    found = {}
    for shard in shards:
        for index, desk in shard.desks.items():
            held = desk.holding
            kept = None if held.kept is None else held.kept.tobytes()
            state = {name: vector.tobytes() for name, vector in held.state.items()}
            facts = (held.version, desk.version, desk.round, held.steps.tolist())
            found[index] = (held.params.tobytes(), kept, state, facts)
    return found


@pytest.mark.parametrize("codec", ["float32", "dct"])
def test_a_run_goes_on_bit_for_bit_on_any_number_of_shards(tmp_path, codec):
    shards = cluster(2)
    begin(shards, 1)
    archives = [Archive(tmp_path, index) for index in range(2)]
    written = [Written(archive) for archive in archives]
    train(shards, archives, range(1, 4), 1, codec, saves=3)
    at_three = holdings(shards)
    train(shards, archives, range(4, 6), 1, codec, saves=0)  # while the files are being written
    records = [msgspec.json.decode(w.wait()[1], type=FileRecord) for w in written]
    for archive in archives:
        archive.close()
    folder = step_folder(tmp_path, 3)
    commit(folder, Manifest(step=3, workers=2, shards=2, facts={}, files=records))
    snapshot = Snapshot(folder)
    snapshot.verify()
    for count in (1, 2, 3, 5):
        again = cluster(count, restorer(snapshot))
        assert holdings(again) == at_three
        marks = [desk.ledger.marks() for shard in again for desk in shard.desks.values()]
        assert all(
            {w: (m.incarnation, m.seq) for w, m in own.items()} == {0: (1, 3), 1: (1, 3)} for own in marks
        )
        begin(again, 4)
        idle = [Archive(tmp_path / "idle", index) for index in range(count)]
        train(again, idle, range(4, 6), 2, codec, saves=0)
        for archive in idle:
            archive.close()
        assert holdings(again) == holdings(shards)


def test_what_is_kept_comes_back_as_it_was_even_where_it_is_zero(tmp_path):
    talk = Talk(1).begin()
    archive = Archive(tmp_path, 0)
    written = Written(archive)
    talk.shard.desks[0].holding.kept = np.zeros(PARTS[0].size, np.float32)
    for desk in talk.shard.desks.values():
        archive.capture(1, desk, talk.shard.desks)
    record = msgspec.json.decode(written.wait()[1], type=FileRecord)
    archive.close()
    folder = step_folder(tmp_path, 1)
    commit(folder, Manifest(step=1, workers=1, shards=1, facts={}, files=[record]))
    restore = restorer(Snapshot(folder))
    fresh = [Holding(part, SGD, [0] * len(part.pieces)) for part in PARTS]
    for holding in fresh:
        restore(holding)
    assert not fresh[0].kept.any()
    assert fresh[1].kept is None


def test_a_part_that_is_saved_twice_is_written_once(tmp_path):
    """Workers that do not wait for each other reach the round of a checkpoint one after the other."""
    talk = Talk(1).begin()
    archive = Archive(tmp_path, 0)
    written = Written(archive)
    for _ in range(2):
        archive.capture(7, talk.shard.desks[0], talk.shard.desks)
    for _ in range(2):
        archive.capture(7, talk.shard.desks[1], talk.shard.desks)
    archive.capture(7, talk.shard.desks[0], talk.shard.desks)
    archive.close()
    assert [(seq, why) for seq, _, why in written.reports] == [(7, "")]
    assert [path.name for path in step_folder(tmp_path, 7).iterdir()] == ["shard-0.safetensors"]


def test_a_file_that_cannot_be_written_is_reported_once_and_the_next_one_is(tmp_path):
    talk = Talk(1).begin()
    step_folder(tmp_path, 1).write_bytes(b"in the way")
    archive = Archive(tmp_path, 0)
    written = Written(archive)
    for seq in (1, 2):
        for desk in talk.shard.desks.values():
            archive.capture(seq, desk, talk.shard.desks)
    archive.close()
    assert [(seq, record is None) for seq, record, _ in written.reports] == [(1, True), (2, False)]
    assert "step-000000001" in written.reports[0][2]


def test_what_is_not_complete_leaves_no_file(tmp_path):
    talk = Talk(1).begin()
    archive = Archive(tmp_path, 0)
    archive.capture(1, talk.shard.desks[0], talk.shard.desks)
    archive.close()
    assert list(step_folder(tmp_path, 1).iterdir()) == []


def saved(tmp_path, change) -> Snapshot:
    """A checkpoint whose record was changed by hand."""
    talk = Talk(1).begin()
    archive = Archive(tmp_path, 0)
    written = Written(archive)
    for desk in talk.shard.desks.values():
        archive.capture(1, desk, talk.shard.desks)
    record = msgspec.json.decode(written.wait()[1])
    archive.close()
    change(record["facts"]["parts"])
    folder = step_folder(tmp_path, 1)
    file = msgspec.convert(record, FileRecord)
    commit(folder, Manifest(step=1, workers=1, shards=1, facts={}, files=[file]))
    return Snapshot(folder)


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
def test_facts_that_do_not_fit_are_refused(tmp_path, change):
    restore = restorer(saved(tmp_path, change))
    with pytest.raises(SnapshotError, match="part 0"):
        restore(Holding(PARTS[0], SGD, [0] * len(PARTS[0].pieces)))


def test_a_part_of_another_size_is_refused(tmp_path):
    restore = restorer(saved(tmp_path, lambda parts: parts.update({"0": parts["1"]})))
    other = Holding(PARTS[1], SGD, [0] * len(PARTS[1].pieces))
    other.part = PARTS[0]
    with pytest.raises(SnapshotError, match="expected"):
        restore(other)
