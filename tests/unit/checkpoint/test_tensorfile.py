"""One file of tensors: equal after a round trip, readable by others, refused when damaged or hostile."""

import json
import os
import pickle
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
import safetensors
import torch
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as load_torch

from shoestring.checkpoint import tensorfile
from shoestring.checkpoint.tensorfile import (
    CHUNK_BYTES,
    MAX_JSON_BYTES,
    STAND_INS,
    TensorFile,
    TensorFileWriter,
)
from shoestring.errors import SnapshotError

SHAPES = [(), (1,), (0,), (3, 0, 2), (7,), (5, 3, 2)]
CODES = ["?", "u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8"]


def random_values(code: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    if code == "?":
        return rng.integers(0, 2, shape).astype(bool)
    size = int(np.prod(shape)) * np.dtype(code).itemsize
    return np.frombuffer(rng.bytes(size), code).reshape(shape)  # any bits: also NaN and -0


def all_kinds() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        f"part.{index:05d}.{np.dtype(code).name}": random_values(code, shape, rng)
        for index, shape in enumerate(SHAPES)
        for code in CODES
    }


def write_file(path, tensors, order=None, facts=None):
    writer = TensorFileWriter(path, {name: (x.dtype, x.shape) for name, x in tensors.items()})
    for name in order or tensors:
        writer.write(name, tensors[name])
    return writer.finish(facts)


def assert_same(found: np.ndarray, want: np.ndarray) -> None:
    assert (found.dtype, found.shape) == (want.dtype, want.shape)
    assert found.tobytes() == want.tobytes()


def file_with(path, header: bytes | dict, data: bytes = b"", length: int | None = None):
    if isinstance(header, dict):
        header = json.dumps(header).encode()
    path.write_bytes((len(header) if length is None else length).to_bytes(8, "little") + header + data)
    return path


def entry(start: int, stop: int, shape=None, dtype="U8") -> dict:
    return {
        "dtype": dtype,
        "shape": [stop - start] if shape is None else shape,
        "data_offsets": [start, stop],
    }


@pytest.mark.parametrize("order", ["given", "reversed", "random"])
def test_round_trip_in_any_order_of_writing(tmp_path, order):
    tensors = all_kinds()
    names = list(tensors)
    if order == "reversed":
        names.reverse()
    elif order == "random":
        np.random.default_rng(1).shuffle(names)
    path = tmp_path / "shard-0.safetensors"
    record = write_file(path, tensors, names, {"ledger": {"0": [1, 2]}})
    assert [tensor.name for tensor in record.tensors] == list(tensors)
    assert (record.name, record.size) == (path.name, path.stat().st_size)
    assert record.facts == {"ledger": {"0": [1, 2]}}
    assert os.listdir(tmp_path) == [path.name]
    for given in (None, record):
        file = TensorFile(path, given)
        file.verify()
        for name, want in tensors.items():
            found = file.read(name)
            assert_same(found, want)
            assert found.flags.writeable


def test_bytes_do_not_depend_on_the_order_of_writing(tmp_path):
    tensors = all_kinds()
    one = write_file(tmp_path / "one" / "shard-0.safetensors", tensors)
    two = write_file(tmp_path / "two" / "shard-0.safetensors", tensors, list(reversed(tensors)))
    assert one == two
    content = [(tmp_path / folder / "shard-0.safetensors").read_bytes() for folder in ("one", "two")]
    assert content[0] == content[1]


def test_the_safetensors_library_reads_what_we_write(tmp_path):
    tensors = all_kinds()
    path = tmp_path / "shard-0.safetensors"
    write_file(path, tensors)
    found = load_file(path)
    assert found.keys() == tensors.keys()
    for name, want in tensors.items():
        assert_same(found[name], want)


def test_we_read_what_the_safetensors_library_writes(tmp_path):
    tensors = all_kinds()
    path = tmp_path / "other.safetensors"
    save_file(tensors, path, metadata={"format": "np"})
    file = TensorFile(path)
    file.verify()
    assert file.entries.keys() == tensors.keys()
    for name, want in tensors.items():
        assert_same(file.read(name), want)


def test_numbers_that_numpy_does_not_know_are_written_as_torch_knows_them(tmp_path):
    path = tmp_path / "shard-0.safetensors"
    tensors = {name: np.arange(6, dtype=f"u{kind.itemsize}").view(kind) for name, kind in STAND_INS.items()}
    write_file(path, tensors)
    for name, found in load_torch(path).items():
        assert found.dtype == getattr(torch, name)
        own = found.view(torch.int16 if found.element_size() == 2 else torch.uint8)
        assert own.tolist() == list(range(6))
    again = TensorFile(path)
    for name, want in tensors.items():
        assert_same(again.read(name), want)


def test_a_file_without_tensors(tmp_path):
    path = tmp_path / "worker-0.safetensors"
    record = write_file(path, {}, facts={"seed": 7})
    assert record.tensors == []
    assert TensorFile(path, record).entries == {}
    assert load_file(path) == {}


def test_every_tensor_lies_aligned(tmp_path):
    path = tmp_path / "shard-0.safetensors"
    write_file(path, all_kinds())
    start = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    assert start % 64 == 0
    for found in TensorFile(path).entries.values():
        assert found.start % found.dtype.itemsize == 0


BASE = np.arange(6 * CHUNK_BYTES // 8, dtype=np.float32).reshape(-1, 3, 4)


@pytest.mark.parametrize(
    "values",
    [BASE, BASE[::2], BASE[:, 1:, ::-1], BASE.T, np.asfortranarray(BASE), BASE.astype(">f4"), BASE[:0].T],
    ids=["whole", "rows", "reversed", "transposed", "fortran", "big-endian", "empty"],
)
def test_strides_and_byte_order_do_not_matter(tmp_path, values):
    path = tmp_path / "shard-0.safetensors"
    record = write_file(path, {"x": values})
    assert_same(TensorFile(path, record).read("x"), np.ascontiguousarray(values).astype("<f4"))


@pytest.mark.parametrize("is_transposed", [False, True])
def test_memory_holds_no_second_copy(tmp_path, is_transposed):
    path = tmp_path / "shard-0.safetensors"
    values = np.ones((16, CHUNK_BYTES // 4), np.float32)
    values = values.T if is_transposed else values
    room = 3 * CHUNK_BYTES
    tracemalloc.start()
    try:
        record = write_file(path, {"x": values})
        assert tracemalloc.get_traced_memory()[1] < room
        file = TensorFile(path, record)
        file.verify()
        assert tracemalloc.get_traced_memory()[1] < room
        file.read("x")
        assert values.nbytes <= tracemalloc.get_traced_memory()[1] < values.nbytes + room
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda w: w.write("b", np.zeros(2, np.int64)), "`b` was not announced"),
        (lambda w: [w.write("a", np.zeros(2, np.float32)) for _ in range(2)], "`a` is written twice"),
        (lambda w: w.write("a", np.zeros(3, np.float32)), r"`a` is float32 \(3,\), expected float32 \(2,\)"),
        (lambda w: w.write("a", np.zeros(2, np.float64)), "`a` is float64"),
        (lambda w: w.write("a", np.zeros((2, 1), np.float32)), r"`a` is float32 \(2, 1\)"),
        (lambda w: w.finish(), "1 tensors were not written, the first is `a`"),
    ],
)
def test_what_was_not_announced_is_refused(tmp_path, act, message):
    path = tmp_path / "shard-0.safetensors"
    with (
        pytest.raises(SnapshotError, match=message),
        TensorFileWriter(path, {"a": ("float32", (2,))}) as writer,
    ):
        act(writer)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "specs"),
    [
        ("shard-0.bin", {}),
        ("manifest.json", {}),
        (".safetensors", {}),
        ("..safetensors", {}),
        ("a b.safetensors", {}),
        ("shard-0.safetensors", {"__metadata__": ("u1", (1,))}),
        ("shard-0.safetensors", {"": ("u1", (1,))}),
        ("shard-0.safetensors", {"a\n": ("u1", (1,))}),
        ("shard-0.safetensors", {"a": ("c16", (1,))}),
        ("shard-0.safetensors", {"a": ("U3", (1,))}),
    ],
)
def test_names_and_dtypes_that_cannot_be_read_are_not_written(tmp_path, name, specs):
    with pytest.raises(SnapshotError, match="cannot be written"):
        TensorFileWriter(tmp_path / name, specs)
    assert os.listdir(tmp_path) == []


def test_a_header_that_could_not_be_read_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr(tensorfile, "MAX_JSON_BYTES", 1000)
    specs = {f"part.{index:05d}.params": ("float32", (1,)) for index in range(20)}
    with pytest.raises(SnapshotError, match="20 tensors need a header of more than 1000 bytes"):
        TensorFileWriter(tmp_path / "shard-0.safetensors", specs)
    assert os.listdir(tmp_path) == []


def test_until_it_is_finished_the_older_file_stays(tmp_path):
    path = tmp_path / "shard-0.safetensors"
    old, new = {"x": np.zeros(4)}, {"x": np.ones(4)}
    record = write_file(path, old)
    writer = TensorFileWriter(path, {"x": ("float64", (4,))})
    writer.write("x", new["x"])
    assert_same(TensorFile(path, record).read("x"), old["x"])
    writer.abandon()
    writer.abandon()
    assert os.listdir(tmp_path) == [path.name]
    for act in (writer.finish, lambda: writer.write("x", new["x"])):
        with pytest.raises(SnapshotError, match="abandoned before|written twice"):
            act()
    assert_same(TensorFile(path, record).read("x"), old["x"])
    newer = write_file(path, new)
    assert_same(TensorFile(path, newer).read("x"), new["x"])


def test_two_attempts_do_not_write_into_each_other(tmp_path):
    """A process that should be dead may still write the same file."""
    path = tmp_path / "shard-0.safetensors"
    specs = {"x": ("float64", (4,)), "y": ("float64", (4,))}
    zombie, writer = TensorFileWriter(path, specs), TensorFileWriter(path, specs)
    for name in specs:
        writer.write(name, np.ones(4))
        zombie.write(name, np.zeros(4))
    record = writer.finish()
    TensorFile(path, record).verify()
    zombie.finish()
    with pytest.raises(SnapshotError, match=r"shard-0.safetensors` has tensor `x` with a SHA-256"):
        TensorFile(path, record).verify()


def test_data_is_on_disk_before_the_name_is(tmp_path, monkeypatch):
    calls = []

    def spy(name, describe):
        real = getattr(os, name)

        def spied(*args, **options):
            calls.append(describe(*args))
            return real(*args, **options)

        monkeypatch.setattr(os, name, spied)

    def place(descriptor, *_):
        return os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")).partition(".safetensors")[2]

    spy("pwrite", lambda descriptor, *_: ("write", place(descriptor)[-8:]))
    spy("fsync", lambda descriptor: ("sync", place(descriptor)[-8:]))
    spy("replace", lambda old, new: ("rename", new.name))
    path = tmp_path / "shard-0.safetensors"
    write_file(path, {"x": np.ones(4)})
    assert calls == [
        ("write", ".partial"),
        ("write", ".partial"),
        ("sync", ".partial"),
        ("rename", path.name),
        ("sync", ""),
    ]


FULL_DISK = """
import resource, sys
from pathlib import Path
import numpy as np
from shoestring.errors import SnapshotError
from shoestring.checkpoint.tensorfile import TensorFileWriter

resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
try:
    writer = TensorFileWriter(Path(sys.argv[1]), {"x": ("float64", (4096,)), "y": ("float64", (4096,))})
    writer.write("x", np.ones(4096))
    writer.write("y", np.ones(4096))
    writer.finish()
except SnapshotError as error:
    print(error)
"""


@pytest.mark.parametrize("limit", [0, 100, 20_000, 32_768 + 192, 65_700])
def test_a_disk_that_is_full_leaves_nothing_partial(tmp_path, limit):
    """The operating system refuses to let the file grow, wherever that happens."""
    path = tmp_path / "shard-0.safetensors"
    record = write_file(path, {"x": np.zeros(4)})
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, path, str(limit)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == (
        f"`{path}` cannot be written: File too large "
        "(hint: free some space, keep fewer checkpoints, or write them to a larger disk)\n"
    )
    assert os.listdir(tmp_path) == [path.name]
    assert_same(TensorFile(path, record).read("x"), np.zeros(4))


def test_a_folder_that_cannot_be_made_is_an_error_with_its_path(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SnapshotError, match=r"file/shard-0.safetensors` cannot be written"):
        TensorFileWriter(tmp_path / "file" / "shard-0.safetensors", {})


HOSTILE = {
    "empty file": b"",
    "seven bytes": b"1234567",
    "no header": bytes(8),
    "huge length": b"\xff" * 8 + b"{}",
    "length beyond the file": (3).to_bytes(8, "little") + b"{}",
    "pickle": pickle.dumps({"weights": [1.0] * 100}),
    "pickle header": (len(p := pickle.dumps([1]))).to_bytes(8, "little") + p,
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_bytes_that_are_no_tensor_file_are_refused(tmp_path, content):
    path = tmp_path / "shard-0.safetensors"
    path.write_bytes(content)
    with pytest.raises(SnapshotError, match=f"`{path}` "):
        TensorFile(path)


HEADERS = {
    "list": b"[]",
    "text after it": b"{} {}",
    "not UTF-8": b'{"\xff":1}',
    "deep lists": b'{"a":' + b"[" * 100_000,
    "deep objects": b'{"a":' * 100_000,
    "deep metadata": b'{"__metadata__":' + b'{"a":' * 100_000,
    "metadata that is no text": {"__metadata__": {"a": 1}},
    "entry that is no object": {"a": [0, 4]},
    "field missing": {"a": {"dtype": "U8", "shape": [4]}},
    "field unknown": {"a": {**entry(0, 4), "run": "me"}},
    "dtype unknown": {"a": entry(0, 4, dtype="OBJ")},
    "dtype of Python": {"a": entry(0, 4, dtype="O")},
    "float8 of another kind": {"a": entry(0, 4, dtype="F8_E8M0")},
    "shape too small": {"a": entry(0, 4, [3])},
    "shape too large": {"a": entry(0, 4, [5])},
    "shape overflows": {"a": entry(0, 4, [1 << 62, 4, 4])},
    "shape wraps around": {"a": entry(0, 4, [(1 << 62) + 1, 4])},
    "shape negative": {"a": entry(0, 4, [-2, -2])},
    "shape a float": {"a": entry(0, 4, [4.5])},
    "shape of a thousand": {"a": entry(0, 4, [4] + [1] * 999)},
    "offset negative": {"a": entry(-4, 0)},
    "offset beyond the file": {"a": entry(0, 5)},
    "offset far beyond": {"a": entry(0, 1 << 60)},
    "offset beyond 64 bits": {"a": entry(0, 1 << 80)},
    "stop before start": {"a": entry(4, 0, [0])},
    "bytes that belong to none": {"a": entry(0, 3)},
    "gap": {"a": entry(0, 1), "b": entry(2, 4)},
    "overlap": {"a": entry(0, 3), "b": entry(2, 4)},
    "two at one place": {"a": entry(0, 4), "b": entry(0, 4)},
    "twice": b'{"a":%s,"a":%s}' % ((json.dumps(entry(0, 4)).encode(),) * 2),
    "twice, empty": b'{"a":%s,"b":%s,"a":%s}'
    % tuple(json.dumps(entry(*place)).encode() for place in [(0, 0), (0, 4), (4, 4)]),
    "twice within": b'{"a":{"dtype":"I8","dtype":"U8","shape":[4],"data_offsets":[0,4]}}',
}


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS)
def test_hostile_headers_are_refused(tmp_path, header):
    path = file_with(tmp_path / "shard-0.safetensors", header, b"1234")
    with pytest.raises(SnapshotError, match=f"`{path}` has a header that is not valid") as caught:
        TensorFile(path)
    assert len(str(caught.value)) < 500 + len(str(path))


def test_the_hostile_headers_differ_from_a_good_one_by_their_fault(tmp_path):
    path = file_with(tmp_path / "shard-0.safetensors", {"a": entry(0, 1), "b": entry(1, 4)}, b"1234")
    assert TensorFile(path).read("b").tobytes() == b"234"


def test_a_header_over_the_limit_is_not_read(tmp_path):
    path = tmp_path / "shard-0.safetensors"
    with open(path, "wb") as file:
        file.write((MAX_JSON_BYTES + 1).to_bytes(8, "little") + b"{}")
        file.truncate(1 << 40)  # a hole: the file is large, the disk is not
    tracemalloc.start()
    try:
        with pytest.raises(SnapshotError, match="does not begin with the length of a header"):
            TensorFile(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_objects_are_not_made_of_what_has_the_wrong_shape(tmp_path):
    lists = b"[" + b"[]," * (1 << 20) + b"[]]"
    path = file_with(tmp_path / "shard-0.safetensors", b'{"a":%s}' % lists)
    tracemalloc.start()
    try:
        with pytest.raises(SnapshotError, match="not valid"):
            TensorFile(path)
        assert tracemalloc.get_traced_memory()[1] < 4 * len(lists)
    finally:
        tracemalloc.stop()


def test_a_tensor_that_memory_cannot_hold_is_refused(tmp_path):
    path = file_with(tmp_path / "shard-0.safetensors", {"a": entry(0, 0, [0, 1 << 62, 1 << 62])})
    with pytest.raises(SnapshotError, match="memory cannot hold"):
        TensorFile(path).read("a")


@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "missing"])
def test_only_plain_files_are_opened(tmp_path, kind):
    path = tmp_path / "shard-0.safetensors"
    if kind == "link":
        write_file(tmp_path / "real.safetensors", {"x": np.zeros(4)})
        path.symlink_to("real.safetensors")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    with pytest.raises(SnapshotError, match=f"`{path}` is "):
        TensorFile(path)


def test_a_file_cut_off_while_it_is_open_is_refused(tmp_path):
    path = tmp_path / "shard-0.safetensors"
    record = write_file(path, {"x": np.zeros(400)})
    file = TensorFile(path, record)
    os.truncate(path, record.size - 8)
    with pytest.raises(SnapshotError, match=f"ends at byte {record.size - 8}"):
        file.read("x")


def test_the_library_refuses_gaps_as_we_do(tmp_path):
    path = file_with(tmp_path / "shard-0.safetensors", HEADERS["gap"], b"1234")
    with pytest.raises(safetensors.SafetensorError):
        load_file(path)
