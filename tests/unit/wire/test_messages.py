"""The layout of messages: what is on the wire must not change without a new protocol number."""

import typing

import msgspec

from shoestring.wire import messages as say
from tests.unit.wire.samples import SAMPLES


def test_every_kind_has_a_sample_and_a_number_of_its_own():
    kinds = typing.get_args(say.Any)
    assert [type(sample) for sample in SAMPLES] == list(kinds)
    assert [kind.__struct_config__.tag for kind in kinds] == list(range(1, len(kinds) + 1))


def test_a_message_is_an_array_that_begins_with_its_number():
    packed = [msgspec.msgpack.decode(msgspec.msgpack.encode(sample)) for sample in SAMPLES]
    assert packed[0] == [1, 1, "run", 2, 3, 4, 5, 6, "s"]
    assert packed[7] == [8, 1, 2, 3, "p", 4.5, 1, b"s", [0.5]]
    assert packed[8] == [9, 1, 2, 3, "dct", True, "p", 4.5, b"s", [0.5]]
    assert packed[16] == [17]
    assert [fields[0] for fields in packed] == list(range(1, len(SAMPLES) + 1))


def test_no_sample_leaves_a_field_at_its_default():
    for sample in SAMPLES:
        for field in msgspec.structs.fields(sample):
            assert getattr(sample, field.name) != field.default
