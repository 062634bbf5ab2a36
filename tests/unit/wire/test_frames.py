"""Messages cross the wire unchanged; whatever else comes is a `WireError`."""

import msgspec
import numpy as np
import pytest

from shoestring.errors import WireError
from shoestring.wire import frames
from shoestring.wire import messages as say
from tests.unit.wire.samples import SAMPLES

PAYLOADS = (b"", b"\0", bytes(range(256)), b"x" * 4097)


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: type(sample).__name__)
@pytest.mark.parametrize("payload", PAYLOADS, ids=len)
def test_round_trip(sample, payload):
    message, got = frames.decode(frames.encode(sample, payload))
    assert message == sample
    assert type(message) is type(sample)
    assert bytes(got) == payload


def test_a_payload_may_lie_in_an_array_and_is_not_copied():
    values = np.arange(5, dtype=np.float32)
    encoded = frames.encode(say.Init(1), values.view(np.uint8).data)
    _, payload = frames.decode(encoded)
    values[0] = 7
    assert np.frombuffer(payload, np.float32)[0] == 7


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: type(sample).__name__)
def test_every_single_flipped_bit_is_found(sample):
    encoded = [bytearray(frame) for frame in frames.encode(sample, b"payload")]
    for frame in encoded:
        for bit in range(8 * len(frame)):
            frame[bit // 8] ^= 1 << bit % 8
            with pytest.raises(WireError):
                frames.decode([bytes(f) for f in encoded])
            frame[bit // 8] ^= 1 << bit % 8
    assert frames.decode([bytes(f) for f in encoded])[0] == sample


@pytest.mark.parametrize("count", [0, 1, 3, 100])
def test_a_wrong_number_of_frames(count):
    header, payload = frames.encode(say.Leave())
    with pytest.raises(WireError, match=f"{count} frames, expected 2"):
        frames.decode([header, payload, *[b""] * 98][:count])


def sealed(body: bytes, payload: bytes = b"") -> tuple[bytes, bytes]:
    return frames._CRC.pack(frames._checksum(body, payload)) + body, payload


def test_sizes_out_of_bounds(monkeypatch):
    monkeypatch.setattr(frames, "PAYLOAD_LIMIT", 100)
    message = say.Refusal("m" * (frames.HEADER_LIMIT - 60), "h")
    assert frames.decode(frames.encode(message, bytes(100)))[0] == message
    for bad in (
        frames.encode(say.Refusal("m" * frames.HEADER_LIMIT, "h")),
        frames.encode(say.Leave(), bytes(101)),
        (b"", b""),
        (b"1234", b""),
    ):
        with pytest.raises(WireError, match="out of bounds"):
            frames.decode(bad)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode([99]),
        msgspec.msgpack.encode([]),
        msgspec.msgpack.encode({}),
        msgspec.msgpack.encode([3]),
        msgspec.msgpack.encode([3, "1"]),
        msgspec.msgpack.encode([3, 1.5]),
        msgspec.msgpack.encode([3, 1, 2]),
        msgspec.msgpack.encode([3, 1]) + b"\0",
        msgspec.msgpack.encode([3, None]),
        msgspec.msgpack.encode([18, b"\xff", "h"]),
        b"\x93\x12\xa1\xff\xa1h",
        b"\x91" * 100_000,
        b"\x92\x03" + b"\x91" * 100_000,
        b"\xdd\xff\xff\xff\xff",
        b"\x93\x12\xdb\xff\xff\xff\xff",
        msgspec.msgpack.encode([3, msgspec.msgpack.Ext(1, b"x")]),
    ],
)
def test_a_header_that_is_no_message(body):
    with pytest.raises(WireError):
        frames.decode(sealed(body))


def test_any_number_that_can_be_sent_can_be_sent_back():
    for number in (-(2**63), -1, 0, 2**63, 2**64 - 1):
        message, _ = frames.decode(sealed(msgspec.msgpack.encode([13, number, number])))
        assert frames.decode(frames.encode(message))[0] == say.Missing(number, number)
