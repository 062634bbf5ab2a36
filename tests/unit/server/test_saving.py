"""Parts are saved while rounds go on, and read back on other shards."""

import msgspec
import numpy as np
import pytest

from shoestring.checkpoint.shard import ShardWriter
from shoestring.checkpoint.snapshot import FileRecord, Manifest, Snapshot, commit, step_folder
from shoestring.model.parts import assign
from shoestring.server.holding import Holding
from shoestring.server.rounds import PartRounds
from shoestring.server.saving import marks_of, restorer, values_of
from shoestring.server.shard import Shard
from shoestring.wire import messages as say
from tests.unit.checkpoint.parts import Written
from tests.unit.server.talk import EMPTY, PARTS, SGD, Talk, hello_of, push_of, table


def save(writer: ShardWriter, seq: int, rounds: PartRounds, shard: Shard) -> None:
    parts = [values_of(other.holding) for other in shard.parts.values()]
    writer.capture(seq, values_of(rounds.holding), marks_of(rounds), parts)


def finish_all(shard: Shard, writer: ShardWriter) -> None:
    """What the service does: capture between finishing a part and its next work."""
    while (work := shard.next_work()) is not None:
        work.run()
        shard.finish(work)
        if work.is_saved:
            save(writer, work.seq, work.rounds, shard)
    shard.outbox.clear()


def cluster(shards: int, dtype: str, restore=None) -> list[Shard]:
    made = []
    packed = memoryview(msgspec.msgpack.encode(table(dtype=dtype)))
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


def train(shards: list[Shard], writers, seqs, life: int, codec: str, saves: int) -> None:
    for seq in seqs:
        for part in PARTS:
            for worker in (1, 0):
                push, payload = push_of(part.index, worker, seq, codec=codec, life=life, save=seq == saves)
                tell(shards, part.index, worker, push, payload)
        for shard, writer in zip(shards, writers, strict=True):
            finish_all(shard, writer)


def holdings(shards: list[Shard]) -> dict[int, tuple]:
    """All of each part, as bytes."""
    found = {}
    for shard in shards:
        for index, rounds in shard.parts.items():
            held = rounds.holding
            kept = None if held.feedback is None else held.feedback.tobytes()
            state = {name: vector.tobytes() for name, vector in held.state.items()}
            facts = (held.version, rounds.version, rounds.round, held.steps.tolist())
            found[index] = (held.params.tobytes(), held.values.tobytes(), kept, state, facts)
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("codec", ["float32", "dct"])
def test_a_run_goes_on_bit_for_bit_on_any_number_of_shards(tmp_path, codec, dtype):
    shards = cluster(2, dtype)
    begin(shards, 1)
    writers = [ShardWriter(tmp_path, index) for index in range(2)]
    written = [Written(writer) for writer in writers]
    train(shards, writers, range(1, 4), 1, codec, saves=3)
    at_three = holdings(shards)
    train(shards, writers, range(4, 6), 1, codec, saves=0)  # while the files are being written
    records = [msgspec.json.decode(w.wait()[1], type=FileRecord) for w in written]
    for writer in writers:
        writer.close()
    folder = step_folder(tmp_path, 3)
    commit(folder, Manifest(step=3, workers=2, shards=2, facts={}, files=records))
    snapshot = Snapshot(folder)
    snapshot.verify()
    for count in (1, 2, 3, 5):
        again = cluster(count, dtype, restorer(snapshot))
        assert holdings(again) == at_three
        marks = [rounds.ledger.marks() for shard in again for rounds in shard.parts.values()]
        assert all(
            {w: (m.incarnation, m.seq) for w, m in own.items()} == {0: (1, 3), 1: (1, 3)} for own in marks
        )
        begin(again, 4)
        idle = [ShardWriter(tmp_path / "idle", index) for index in range(count)]
        train(again, idle, range(4, 6), 2, codec, saves=0)
        for writer in idle:
            writer.close()
        assert holdings(again) == holdings(shards)


def test_feedback_comes_back_as_it_was_even_where_it_is_zero(tmp_path):
    talk = Talk(1).begin()
    writer = ShardWriter(tmp_path, 0)
    written = Written(writer)
    talk.shard.parts[0].holding.feedback = np.zeros(PARTS[0].size, np.float32)
    for rounds in talk.shard.parts.values():
        save(writer, 1, rounds, talk.shard)
    record = msgspec.json.decode(written.wait()[1], type=FileRecord)
    writer.close()
    folder = step_folder(tmp_path, 1)
    commit(folder, Manifest(step=1, workers=1, shards=1, facts={}, files=[record]))
    restore = restorer(Snapshot(folder))
    fresh = [Holding(part, SGD, [0] * len(part.pieces)) for part in PARTS]
    for holding in fresh:
        restore(holding)
    assert not fresh[0].feedback.any()
    assert fresh[1].feedback is None
