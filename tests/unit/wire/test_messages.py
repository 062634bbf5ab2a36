"""The layout of messages: what is on the wire must not change without a new protocol number."""

import math
import typing

import msgspec
import pytest

from shoestring.errors import WireError
from shoestring.wire import frames
from shoestring.wire import messages as say
from tests.unit.wire.samples import SAMPLES


def test_every_kind_has_a_sample_and_a_number_of_its_own():
    kinds = typing.get_args(say.Any)
    assert [type(sample) for sample in SAMPLES] == list(kinds)
    assert [kind.__struct_config__.tag for kind in kinds] == list(range(1, len(kinds) + 1))


def test_a_message_is_an_array_that_begins_with_its_number():
    packed = [msgspec.msgpack.decode(msgspec.msgpack.encode(sample)) for sample in SAMPLES]
    decisions = [[5, 1], [6, [3, 1]], [0.5], [[1, 2, 3, 4]], [9, "local:4", "dct"]]
    assert packed[0] == [1, 1, "run", 2, 3, "l", 4, 5, 6, "s"]
    assert packed[7] == [8, 1, 2, 3, 4.5, 1, b"s", decisions, b"u", b"n", True]
    assert packed[8] == [9, 1, 2, 3, "dct", True, 4.5, b"s", decisions, b"u", b"n", True]
    assert packed[16] == [17, "local:4"]
    assert [fields[0] for fields in packed] == list(range(1, len(SAMPLES) + 1))


def test_no_sample_leaves_a_field_at_its_default():
    for sample in SAMPLES:
        for field in msgspec.structs.fields(sample):
            assert getattr(sample, field.name) != field.default


@pytest.mark.parametrize(
    "spoiled",
    [
        {"seq": 0},
        {"have": -1},
        {"weight": 0.0},
        {"weight": math.inf},
        {"codec": "x" * 129},
        {"bound": -2},
        {"decisions": say.Decisions(delay=say.Delay(1, 2))},
        {"decisions": say.Decisions(delay=say.Delay(0, 1))},
        {"decisions": say.Decisions(shares=say.Shares(1, ()))},
        {"decisions": say.Decisions(shares=say.Shares(1, (1, 0)))},
        {"decisions": say.Decisions(shares=say.Shares(-1, (1,)))},
        {"decisions": say.Decisions(paces=(-1.0,))},
        {"decisions": say.Decisions(paces=(math.nan,))},
    ],
)
def test_what_is_beyond_its_limits_is_not_decoded(spoiled):
    push = msgspec.structs.replace(SAMPLES[6], **spoiled)
    with pytest.raises(WireError):
        frames.decode(frames.encode(push))


def test_an_incarnation_leaves_room_to_count_on():
    for incarnation, is_taken in ((1 << 48, True), ((1 << 48) + 1, False), ((1 << 64) - 1, False)):
        hello = msgspec.structs.replace(SAMPLES[0], protocol=say.PROTOCOL, incarnation=incarnation)
        if is_taken:
            assert frames.decode(frames.encode(hello))[0] == hello
        else:
            with pytest.raises(WireError):
                frames.decode(frames.encode(hello))


def test_the_decisions_of_three_hundred_workers_travel():
    decisions = say.Decisions(shares=say.Shares(64, (100_000,) * 300), paces=(0.125,) * 300)
    full = say.Full(part=0, version=1, seq=1, decisions=decisions)
    assert frames.decode(frames.encode(full))[0] == full


def test_the_hello_of_another_version_is_named():
    packed = msgspec.msgpack.encode([1, 3, "run", 0, 1, 1, 0, 1, ""])
    crc = frames._CRC.pack(frames._checksum(packed, b""))
    with pytest.raises(WireError, match=f"protocol 3, this shard {say.PROTOCOL}"):
        frames.decode([crc + packed, b""])
