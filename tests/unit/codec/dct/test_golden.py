"""Streams written once decode to the same bits for ever, on every backend."""

import json

import numpy as np
import pytest

from shoestring.codec.base import Layout
from shoestring.errors import StreamError
from tests.golden.dct.write import CASES, FOLDER, digest, ramp
from tests.unit.codec.cases import for_each
from tests.unit.codec.dct.streams import BACKENDS, decode

EXPECTED = json.loads((FOLDER / "expected.json").read_text())


def stored(name: str) -> np.ndarray:
    return np.frombuffer((FOLDER / f"{name.replace(' ', '_')}.bin").read_bytes(), np.uint8)


@for_each("backend", BACKENDS)
@for_each("name", EXPECTED)
def test_golden_stream_decodes_to_the_stored_bits(name, backend):
    layout = Layout.of(EXPECTED[name]["shapes"])
    assert digest(decode(backend, stored(name), layout)) == EXPECTED[name]["set"]
    added = decode(backend, stored(name), layout, ramp(layout.total), 1 / 3)
    assert digest(added) == EXPECTED[name]["added"]


def test_every_golden_stream_is_expected():
    files = {path.stem for path in FOLDER.glob("*.bin")}
    assert files == {name.replace(" ", "_") for name in EXPECTED}


def test_damage_to_a_chunk_of_several_tiles_is_seen_alike():
    """Tiles of one chunk are decoded apart, but refused or taken together."""
    payload, layout = stored("shared"), Layout.of(EXPECTED["shared"]["shapes"])
    outcomes = []
    for at in range(16, payload.size):
        damaged = payload.copy()
        damaged[at] ^= 1 << at % 8
        digests = []
        for backend in BACKENDS:
            try:
                digests.append(digest(decode(backend, damaged, layout)))
            except StreamError:
                digests.append("refused")
        assert digests[0] == digests[1]
        outcomes.append(digests[0])
    assert len(set(outcomes)) > 1
    assert outcomes.count("refused") > len(outcomes) / 2


@for_each("backend", BACKENDS)
def test_a_stream_of_version_1_is_refused(backend):
    payload = np.frombuffer((FOLDER / "version_1" / "mixed.bin").read_bytes(), np.uint8)
    layout = Layout.of(EXPECTED["mixed"]["shapes"])
    with pytest.raises(StreamError, match="the stream is version 1, this is version 2") as caught:
        decode(backend, payload, layout)
    assert "same version" in caught.value.hint


@for_each("name", [name for name in CASES if name.startswith("blocks") or name in ("far apart", "shared")])
def test_same_codes_are_still_written_as_the_same_bytes(name):
    """Given the codes, an encoder has no choice left but that of tables, which is part of no version."""
    _, payload = CASES[name]()
    assert payload.tobytes() == stored(name).tobytes()
