"""The Triton backend gives the CPU's bits. Small buckets: the interpreter takes its time."""

import numpy as np
import pytest
import torch

from shoestring.codec.base import Layout
from shoestring.codec.dct import Dct, stream
from shoestring.codec.dct import format as fmt
from shoestring.codec.dct.gpu import GpuDct, entropy, lists, sample
from shoestring.codec.dct.gpu import codec as gpu_codec
from shoestring.errors import CodecError, NonFiniteError, StreamError
from tests.unit.codec.cases import for_each
from tests.unit.codec.dct.streams import headers_of, write

LAYOUT = Layout.of([(2, 4, 3, 3), (10,), (0,), (9, 17), (70,)])
OPTIONS = {
    "default": {"small": 32, "step": 2.0},
    "budget": {"small": 32, "bits": 1.0},
    "always": {"small": 0, "transform": "always", "block": 4, "step": 1.0},
    "never": {"small": 64, "transform": "never", "small_as": "float32", "step": 4.0},
}


def gradient(layout: Layout, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).laplace(size=layout.total).astype(np.float32)


def decode_both(payload: np.ndarray, layout: Layout, weight: float | None) -> list[np.ndarray | None]:
    """Decode on CPU and GPU; None stands for a refusal, after which nothing was added."""
    results: list[np.ndarray | None] = []
    start = -np.zeros(layout.total, np.float32) if weight else np.full(layout.total, np.nan, np.float32)
    for codec in (Dct(), GpuDct()):
        out = start.copy()
        try:
            codec.decode(payload, layout, out if isinstance(codec, Dct) else torch.from_numpy(out), weight)
            results.append(out)
        except StreamError:
            assert weight is None or out.tobytes() == start.tobytes()
            results.append(None)
    return results


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_what_the_gpu_sends_and_keeps_is_what_came_in(options, monkeypatch):
    monkeypatch.setattr(sample, "_NEAR", 2)  # fewer steps are measured for a budget
    values = gradient(LAYOUT)
    left_over = torch.full((LAYOUT.total,), torch.nan)
    payload = GpuDct(**options).encode(torch.from_numpy(values), LAYOUT, left_over).numpy()
    want, got = decode_both(payload, LAYOUT, None)
    assert want.tobytes() == got.tobytes()
    came_in = want.astype(np.float64) + left_over.numpy()
    assert (came_in == want + left_over.numpy()).all()
    assert np.abs(came_in - values).max() <= 2.0**-16
    assert payload.size == pytest.approx(Dct(**options).encode(values, LAYOUT).size, abs=24)


@for_each("weight", [None, -0.3])
@for_each("options", ["default", "always"])
def test_streams_of_the_cpu_decode_to_the_same_bits(options, weight):
    payload = Dct(**OPTIONS[options]).encode(gradient(LAYOUT, 1), LAYOUT)
    want, got = decode_both(payload, LAYOUT, weight)
    assert want.tobytes() == got.tobytes()


@for_each("largest", [3, 127, 32767])
@for_each("n", [3, 8])
def test_codes_that_no_encoder_writes_decode_and_wrap_alike(n, largest):
    layout = Layout.of([((2 if n == 3 else 1) * n * n + 1,)])
    codes = np.random.default_rng(n).integers(-largest, largest + 1, layout.total)
    payload = write(layout, headers_of(n), [codes])
    want, got = decode_both(payload, layout, None)
    assert want.tobytes() == got.tobytes()


@for_each("chunk_log2", [18, 20])
def test_chunks_of_several_tiles_decode_to_the_same_bits(chunk_log2):
    """With gaps that are longer than one may be, and levels that stand for zeros among codes."""
    layout = Layout.of([(40,), (3 * fmt.TILE_VALUES + 5,)])
    tiles = [np.arange(40) - 20, *(np.zeros(fmt.TILE_VALUES, np.int64) for _ in range(3))]
    tiles.append(np.array([0, 0, 7, 0, 0]))
    tiles[1][[5, 9]] = [fmt.MAX_LEVEL, -1]
    tiles[3][[8, 9, 10, 13]] = [fmt.NO_CODE, 2, fmt.NO_CODE, -3]
    payload = write(layout, headers_of(1, 1, chunk_log2=chunk_log2), tiles)
    assert stream.parse(payload, layout).geometry.chunks == (5 if chunk_log2 == 18 else 2)
    want, got = decode_both(payload, layout, None)
    assert np.count_nonzero(want) == 39 + 5
    assert want.tobytes() == got.tobytes()


def test_levels_that_no_code_can_have_are_refused_alike():
    layout = Layout.of([(40,)])
    payload = write(layout, headers_of(1), [np.where(np.arange(40) == 20, fmt.NO_CODE + 1, 1)])
    assert decode_both(payload, layout, 1.0) == [None, None]


def test_damaged_streams_are_refused_alike():
    payload = Dct(**OPTIONS["default"]).encode(gradient(LAYOUT, 2), LAYOUT)
    rng = np.random.default_rng(5)
    refused = 0
    for _ in range(6):
        damaged = payload.copy()
        damaged[rng.integers(16, damaged.size)] ^= rng.integers(1, 256, dtype=np.uint8)
        want, got = decode_both(damaged, LAYOUT, 1.0)
        assert (want is None) == (got is None)
        refused += want is None
        if want is not None:
            assert want.tobytes() == got.tobytes()
    assert refused


def test_chunks_may_begin_anywhere():
    layout = Layout.of([(3,), (38,), (41,)])  # chunks that begin at odd places
    values = torch.from_numpy(gradient(layout, 4))
    payload = GpuDct(small=16, small_as="float32", step=0.7).encode(values, layout).numpy()
    assert stream.parse(payload, layout).geometry.chunks > 1
    want, got = decode_both(payload, layout, 1.0)
    assert want.tobytes() == got.tobytes()
    assert np.sum((want - values.numpy()) ** 2) < np.sum(values.numpy() ** 2)


def test_words_without_room_are_coded_again(monkeypatch):
    layout = Layout.of([(120,)])  # more words than the room that each chunk has in any case
    values = torch.from_numpy(gradient(layout, 3))
    want = GpuDct(step=0.004, small=0).encode(values, layout)
    rooms, encode = [], gpu_codec._encode
    monkeypatch.setattr(gpu_codec, "ROOM", 0)
    monkeypatch.setattr(gpu_codec, "_encode", lambda *given: rooms.append(given[3]) or encode(*given))
    assert GpuDct(step=0.004, small=0).encode(values, layout).tolist() == want.tolist()
    assert rooms == [0, gpu_codec.MOST_ROOM]


def test_payloads_longer_than_expected_arrive_whole(monkeypatch):
    layout = Layout.of([(60,)])
    values = torch.from_numpy(gradient(layout, 3))
    want = GpuDct(step=0.5, small=0).encode(values, layout)
    monkeypatch.setattr(gpu_codec, "MARGIN", -1)
    monkeypatch.setattr(gpu_codec, "MARGIN_BYTES", 0)
    assert GpuDct(step=0.5, small=0).encode(values, layout).tolist() == want.tolist()


def test_chunks_follow_each_other_and_those_that_cannot_be_are_reported():
    lengths = np.random.default_rng(6).integers(0, 900, 100)
    for noted, report in ((0, [0, 0]), (-1, [0, 1]), (fmt.MAX_WORDS + 1, [fmt.MAX_WORDS + 1, 0])):
        lengths[70] = noted
        notes = torch.zeros((lists.NOTES.value, lengths.size), dtype=torch.int32)
        notes[lists.LENGTH.value] = torch.from_numpy(lengths)
        ends, summary = torch.zeros(lengths.size, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
        entropy.place_kernel((1,), notes, ends, summary, lengths.size, BLOCK=32)
        if noted == 0:
            assert ends.tolist() == np.cumsum(lengths).tolist()
            assert summary[0] == lengths.sum()
        assert summary[1:].tolist() == [max(report[0], lengths.max()), report[1]]


def test_a_bucket_of_nothing_is_a_stream():
    for layout in (Layout.of([]), Layout.of([(0,), (300,)])):
        payload = GpuDct().encode(torch.zeros(layout.total), layout)
        assert stream.parse(payload.numpy(), layout).headers["kind"].tolist() == [0] * len(layout.sizes)


def test_what_cannot_be_coded_is_refused():
    layout = Layout.of([(4,)])
    with pytest.raises(NonFiniteError, match="tensor 0"):
        GpuDct().encode(torch.tensor([0, 1, torch.inf, 0]), layout)
    with pytest.raises(CodecError, match="float64"):
        GpuDct().encode(torch.zeros(4, dtype=torch.float64), layout)
    with pytest.raises(CodecError, match="5 values"):
        GpuDct().encode(torch.zeros(5), layout)
