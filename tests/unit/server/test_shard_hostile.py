"""Records of checkpoints, floods, and whatever else a worker may send: done or refused, and bounded."""

import typing

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from shoestring.checkpoint.records import CHECKPOINT_LIMIT
from shoestring.errors import ShoestringError, WireError
from shoestring.server.shard import Shard
from shoestring.wire import frames
from shoestring.wire import messages as say
from tests.unit.server.talk import EMPTY, Talk, hello_of, kinds, push_of, record, refusal, table
from tests.unit.wire.samples import SAMPLES


def test_a_checkpoint_is_reported_to_the_first_worker_when_all_files_are_there():
    talk = Talk().begin()
    for _ in range(2):  # the first answer may be lost
        assert talk.tell(1, say.Saved(5), record(1)) == [("1.1", say.Recorded(5))]
    talk.shard.saved(5, b'{"own":1}')
    assert talk.heard() == []
    assert talk.tell(0, say.AskSnapped(5)) == []
    assert talk.tell(0, say.Saved(5), record(0)) == [("0.1", say.Recorded(5)), ("0.1", say.Snapped(5))]
    files = msgspec.json.decode(talk.payloads[1])
    assert talk.tell(0, say.AskSnapped(5)) == [("0.1", say.Snapped(5))]
    assert msgspec.json.decode(talk.payloads[0]) == files
    assert [file.get("name") for file in files] == [None, "worker-0.safetensors", "worker-1.safetensors"]
    talk.shard.not_saved(6, "disk full" * 10_000)
    said = talk.heard()
    assert kinds(said) == ["0.1 Snapped", "1.1 Snapped"]
    assert said[0][1].error.startswith("disk full")


def test_a_checkpoint_does_not_wait_for_a_worker_that_is_gone():
    talk = Talk().begin()
    talk.tell(1, say.Saved(5), record(1))
    talk.shard.saved(5, b"{}")
    assert kinds(talk.tell(0, say.Leave())) == ["1.1 Snapped", "0.1 Left"]


def test_records_do_not_pile_up_and_must_be_records():
    talk = Talk().begin()
    for seq in range(1000):
        talk.tell(0, say.Saved(seq), record(0))
    assert len(talk.shard._records) == CHECKPOINT_LIMIT
    for junk in (
        b"",
        b"[]",
        b"{",
        b"\xff" * 10,
        bytes(record(0)).replace(b"worker-0", b"../x"),
        b"[" * 10_000,
    ):
        refusal(talk.tell(0, say.Saved(5), memoryview(junk)))


def test_a_flood_of_questions_costs_no_memory():
    talk = Talk().begin()
    talk.round(1, codec="dct")
    for _ in range(300):
        talk.shard.handle(b"0.1", say.Pull(0, 1), EMPTY, 0.0)
    assert len({id(payload.obj) for _, _, payload in talk.shard.outbox}) == 1  # one copy of the part
    talk.shard.outbox.clear()
    for seq in range(1000):
        for message in (say.Scale(seq, 0.5), say.Pull(0, seq + 10**6), say.Ask(0, seq, 0)):
            talk.shard.handle(b"0.1", message, EMPTY, 0.0)
    talk.shard.outbox.clear()
    assert len(talk.shard._readers.waiting) == 1
    assert (len(talk.shard._waiting), talk.shard._asks) == (0, {})


numbers = st.one_of(st.integers(-3, 8), st.sampled_from([-(2**63), 2**31, 2**48, 10**18, 2**64 - 1]))
reals = st.one_of(st.floats(), st.sampled_from([0.0, 1.0, 1e-30, 1e30]))
texts = st.one_of(
    st.sampled_from(
        ["float32", "dct", "int8", "topk", "dct:bits=1", "float16", "dct:block=0", "", ":", "x:y=z"]
    ),
    st.text(max_size=20),
)
hypers = st.one_of(st.just([[0.5, 0.5, 0.0, 0.0]]), st.lists(st.lists(reals, max_size=5), max_size=3))
decisions = st.builds(
    say.Decisions,
    st.none() | st.builds(say.Delay, numbers, numbers),
    st.none() | st.builds(say.Shares, numbers, st.lists(numbers, max_size=3).map(tuple)),
    st.lists(reals, max_size=3).map(tuple),
)
names = st.lists(st.sampled_from(["params", "steps", "momentum", "x"]), max_size=3).map(tuple)
FIELDS = {
    int: numbers,
    float: reals,
    str: texts,
    bool: st.booleans(),
    bytes: st.binary(max_size=3),
    typing.get_args(say.Names)[0]: names,
    list[list[float]]: hypers,
    say.Decisions | None: st.none() | decisions,
    say.Commit | None: st.none() | st.builds(say.Commit, st.integers(1, 4), st.booleans()),
}


PAYLOADS = [
    EMPTY,
    memoryview(b"junk"),
    memoryview(b"{}"),
    record(0),
    *(push_of(part, 0, 1, codec=codec)[1] for part in (0, 1) for codec in ("float32", "dct", "int8")),
    memoryview(msgspec.msgpack.encode(table())),
]


def any_message(kind):
    fields = {
        field.name: FIELDS[typing.get_args(field.type)[0] if "Annotated" in str(field.type) else field.type]
        for field in msgspec.structs.fields(kind)
    }
    return st.builds(kind, **fields)


hostile = st.tuples(
    st.sampled_from([b"0.1", b"1.1", b"0.2", b"?"]),
    st.one_of(
        *(any_message(type(sample)) for sample in SAMPLES),
        st.builds(
            lambda part, worker, seq, bound, codec, skip: push_of(
                part, worker, seq, bound=bound, codec=codec, skip=skip
            )[0],
            *(st.integers(0, 1), st.integers(0, 1), st.integers(1, 4), st.integers(-1, 1)),
            *(st.sampled_from(["float32", "dct"]), st.booleans()),
        ),
        st.builds(
            lambda worker, life, incarnation: hello_of(worker, 2, life, incarnation=incarnation),
            *(st.integers(0, 1), numbers, st.integers(0, 8)),
        ),
        st.builds(say.Enter, st.integers(1, 5)),
    ),
    st.integers(0, len(PAYLOADS) - 1),
)


@settings(max_examples=150)
@given(st.lists(hostile, max_size=40), st.sampled_from([0.0, 1.0]), st.booleans())
def test_whatever_comes_is_done_or_refused(messages, clip_norm, is_begun):
    """Nothing but `ShoestringError` leaves `Work.run`, and nothing `handle`; what is said can be sent."""
    talk = Talk(model=table(clip_norm))
    if is_begun:
        talk.begin()
    works = []
    for sender, made, place in messages:
        try:  # a number beyond its limits does not get past the decoder
            message, payload = frames.decode(frames.encode(made, PAYLOADS[place]))
        except (WireError, OverflowError):
            continue
        talk.shard.handle(sender, message, payload, talk.now)
        while (work := talk.shard.next_work()) is not None:
            works.append(work)
        if len(works) > 1:
            run(talk.shard, works.pop(0))
        for _, said, body in talk.shard.outbox:
            frames.decode(frames.encode(said, body))
        talk.shard.outbox.clear()
        talk.now += 1.0
        talk.shard.tick(talk.now)
    for work in works:
        run(talk.shard, work)


def run(shard: Shard, work) -> None:
    try:
        work.run()
    except ShoestringError as error:
        shard.fail(work, error)
    else:
        shard.finish(work)
