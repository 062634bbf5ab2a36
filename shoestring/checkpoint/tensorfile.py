"""One file of named tensors: written as a stream, read with every byte checked.

The format is safetensors: 8 bytes with the header's length (little-endian), a
JSON header, the tensors' bytes without gaps. Any tool that knows safetensors
opens what is written here. The header is padded so that the data begins at a
multiple of 64, and wider types come first, so every tensor lies aligned.

A file appears under its name only when it is whole and on disk; until then it
has a temporary name, which ends in `.partial`. A `FileRecord` holds a digest of
the header and one of each tensor: together they cover every byte of the file.

What is read may be damaged or hostile. Lengths are checked before anything is
allocated, only plain files are opened, and nothing in a file is ever run.
"""

import errno
import hashlib
import json
import math
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Annotated, Any, BinaryIO, NamedTuple, NoReturn, Self

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from shoestring.errors import SnapshotError

MAX_JSON_BYTES = 16 << 20  # of a header or a manifest: some 140,000 tensors
PARTIAL = ".partial"
CHUNK_BYTES = 1 << 20  # hashed and written, or read and hashed, while it lies in the cache

# Numbers that NumPy does not know: records of one field, which has torch's name for them and holds the bits.
STAND_INS = {
    name: np.dtype([(name, code)])
    for name, code in {"bfloat16": "<u2", "float8_e4m3fn": "u1", "float8_e5m2": "u1"}.items()
}
DTYPES = {
    name: np.dtype(code)
    for name, code in {
        "BOOL": "?", "U8": "u1", "I8": "i1", "U16": "<u2", "I16": "<i2", "U32": "<u4", "I32": "<i4",
        "U64": "<u8", "I64": "<i8", "F16": "<f2", "F32": "<f4", "F64": "<f8", "C64": "<c8",
    }.items()
} | {
    "BF16": STAND_INS["bfloat16"],
    "F8_E4M3": STAND_INS["float8_e4m3fn"],
    "F8_E5M2": STAND_INS["float8_e5m2"],
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_METADATA = "__metadata__"  # the one key of a header that names no tensor
REPORT = "this is a fault of the program, not of the disk: please report it"
_OLDER = "restore from an older checkpoint, and check the disk"

Size = Annotated[int, Meta(ge=0)]
Digest = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
TensorName = Annotated[str, Meta(pattern=r"\A(?!__metadata__\Z)[!-~]{1,200}\Z")]
# No separator and no `..`: such a name cannot lead out of its folder.
FileName = Annotated[str, Meta(pattern=r"\A[a-z0-9][a-z0-9._-]{0,99}\.safetensors\Z")]
Spec = tuple[np.dtype[Any] | str, tuple[int, ...]]


class TensorRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor of a file, and the SHA-256 of its bytes."""

    name: TensorName
    digest: Digest


class FileRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a file must hold. `facts` are JSON data: small things that are no tensors."""

    name: FileName
    size: Size
    header: Digest  # of everything before the first tensor
    tensors: list[TensorRecord]
    facts: dict[str, Any]


class PartialFile:
    """A new file that gets its name, in place of any older one, only when it is whole and on disk.

    Whatever fails, the temporary file is removed and an older file of that name stays as it was.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # A name of its own for each attempt: a process that should be dead cannot write into this one.
        self._temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}{PARTIAL}")
        self._descriptor = -1
        with self._abandoned_on_error():
            path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self._descriptor = os.open(self._temporary, flags, 0o666)

    def write(self, data: bytes | memoryview, at: int) -> None:
        """Write all of `data` at a position."""
        self._refuse_closed()
        rest = memoryview(data)
        with self._abandoned_on_error():
            while rest.nbytes:
                count = os.pwrite(self._descriptor, rest, at)
                rest, at = rest[count:], at + count

    def publish(self) -> None:
        """Give the file its name. After this it is there even if the power fails."""
        self._refuse_closed()
        with self._abandoned_on_error():
            os.fsync(self._descriptor)
            self._close()
            os.replace(self._temporary, self.path)
            sync_folder(self.path.parent)

    def abandon(self) -> None:
        """Remove the temporary file; after `publish` or `abandon` there is none, and nothing happens."""
        with suppress(OSError):
            self._close()
        with suppress(OSError):
            os.unlink(self._temporary)

    def _refuse_closed(self) -> None:
        if self._descriptor < 0:
            raise SnapshotError(f"`{self.path}` was finished or abandoned before", hint=REPORT)

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    @contextmanager
    def _abandoned_on_error(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.abandon()
            raise disk_error(f"`{self.path}` cannot be written", error) from error


class TensorFileWriter:
    """Streams a file whose tensors (dtypes, shapes) are known before their values.

    Holds no copy of the values. Used in a `with`, it abandons what was not
    finished. Not thread-safe.
    """

    def __init__(self, path: Path, specs: Mapping[str, Spec]) -> None:
        self.path = path
        plain = {name: (np.dtype(dtype).newbyteorder("<"), shape) for name, (dtype, shape) in specs.items()}
        try:
            msgspec.convert((path.name, list(plain)), tuple[FileName, list[TensorName]])
        except msgspec.ValidationError as error:
            self._refuse(f"a name that a file or tensor cannot have: {error}")
        for name, (dtype, _) in plain.items():
            if dtype not in _NAMES:
                self._refuse(f"tensor `{name}` has dtype {dtype}, expected one of {', '.join(DTYPES)}")
        header, self._entries = _layout(plain)
        if len(header) > MAX_JSON_BYTES:
            self._refuse(f"{len(plain)} tensors need a header of more than {MAX_JSON_BYTES} bytes")
        self._order = list(plain)
        self._start = len(header)
        self._header = hashlib.sha256(header).hexdigest()
        self._digests: dict[str, str] = {}
        self._file = PartialFile(path)
        self._file.write(header, 0)

    def write(self, name: str, values: NDArray[Any]) -> None:
        """Write one tensor: any order, each once; `values` must not change meanwhile."""
        entry = self._entries.get(name)
        if entry is None or name in self._digests:
            self._refuse(f"tensor `{name}` {'was not announced' if entry is None else 'is written twice'}")
        if (values.dtype.newbyteorder("<"), values.shape) != (entry.dtype, entry.shape):
            self._refuse(
                f"tensor `{name}` is {values.dtype} {values.shape}, expected {entry.dtype} {entry.shape}"
            )
        digest = hashlib.sha256()
        at = self._start + entry.start
        for chunk in _chunks(values):
            digest.update(chunk)
            self._file.write(chunk, at)
            at += chunk.nbytes
        self._digests[name] = digest.hexdigest()

    @property
    def is_complete(self) -> bool:
        """Whether every tensor that was announced is written."""
        return len(self._digests) == len(self._order)

    def finish(self, facts: dict[str, Any] | None = None) -> FileRecord:
        """Give the file its name and say what is in it."""
        missing = [name for name in self._order if name not in self._digests]
        if missing:
            self._refuse(f"{len(missing)} tensors were not written, the first is `{missing[0]}`")
        self._file.publish()
        return FileRecord(
            name=self.path.name,
            size=self._start + sum(entry.stop - entry.start for entry in self._entries.values()),
            header=self._header,
            tensors=[TensorRecord(name, self._digests[name]) for name in self._order],
            facts={} if facts is None else facts,
        )

    def abandon(self) -> None:
        """Remove the temporary file. After `finish` nothing happens."""
        self._file.abandon()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abandon()

    def _refuse(self, problem: str) -> NoReturn:
        raise SnapshotError(f"`{self.path}` cannot be written: {problem}", hint=REPORT)


class Entry(NamedTuple):
    """One tensor as a header describes it; `start` and `stop` count from the end of the header."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int
    stop: int


class TensorFile:
    """A file to read. With a record, nothing that differs from it is ever returned.

    Holds no open file: every read opens the path again and checks what it finds.
    """

    def __init__(self, path: Path, record: FileRecord | None = None) -> None:
        self.path = path
        self._digests = {} if record is None else {tensor.name: tensor.digest for tensor in record.tensors}
        with open_plain(path) as (descriptor, size):
            if record is not None and size != record.size:
                raise damaged(path, f"has {size} bytes, expected {record.size}")
            prefix = self._read_bytes(descriptor, min(8, size), 0)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > min(MAX_JSON_BYTES, size - 8):
                raise damaged(
                    path,
                    f"does not begin with the length of a header: {length} in a file of {size} bytes, "
                    f"the most is {MAX_JSON_BYTES}",
                )
            header = self._read_bytes(descriptor, length, 8)
        if record is not None and hashlib.sha256(prefix + header).hexdigest() != record.header:
            raise damaged(path, "has a header whose SHA-256 is not that in the manifest")
        self._start = 8 + length
        try:
            self.entries = _parse_header(header, size - self._start)
        except (ValueError, RecursionError) as error:  # msgspec's errors are `ValueError`s, too
            raise damaged(path, f"has a header that is not valid: {error}") from error
        if record is not None and self.entries.keys() != self._digests.keys():
            raise damaged(path, "does not hold the tensors that the manifest names")

    def read(self, name: str) -> NDArray[Any]:
        """Read one tensor into memory of its own."""
        entry = self.entries[name]
        try:
            octets = np.empty(entry.stop - entry.start, np.uint8)
            values = octets.view(entry.dtype).reshape(entry.shape)
        except (MemoryError, ValueError) as error:
            raise damaged(self.path, f"has tensor {name!a}, which memory cannot hold") from error
        self._scan(name, entry, octets)
        return values

    def verify(self) -> None:
        """Read every tensor and compare it with the record, in memory of fixed size."""
        for name, entry in self.entries.items():
            self._scan(name, entry, None)

    def _scan(self, name: str, entry: Entry, out: NDArray[np.uint8] | None) -> None:
        """Hash a tensor's bytes, which go to `out` or nowhere."""
        count = entry.stop - entry.start
        scratch = np.empty(min(count, CHUNK_BYTES), np.uint8) if out is None else out
        digest = hashlib.sha256()
        with open_plain(self.path) as (descriptor, _):
            for done in range(0, count, CHUNK_BYTES):
                first = 0 if out is None else done
                chunk = scratch[first : first + min(CHUNK_BYTES, count - done)].data
                self._fill(descriptor, chunk, self._start + entry.start + done)
                digest.update(chunk)
        if name in self._digests and digest.hexdigest() != self._digests[name]:
            raise damaged(self.path, f"has tensor `{name}` with a SHA-256 that is not that in the manifest")

    def _read_bytes(self, descriptor: int, count: int, at: int) -> bytes:
        octets = bytearray(count)
        self._fill(descriptor, memoryview(octets), at)
        return bytes(octets)

    def _fill(self, descriptor: int, view: memoryview, at: int) -> None:
        while view.nbytes:
            count = os.preadv(descriptor, [view], at)
            if count == 0:
                raise damaged(self.path, f"ends at byte {at}, in the middle of its data")
            view, at = view[count:], at + count


def write_tensors(file: BinaryIO, tensors: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]) -> None:
    """Write tensors that are all there, as other programs expect them: with `metadata`, under any name."""
    specs = {name: (values.dtype.newbyteorder("<"), values.shape) for name, values in tensors.items()}
    for name, (dtype, _) in specs.items():
        if dtype not in _NAMES:
            raise SnapshotError(
                f"tensor `{name}` has dtype {dtype}", hint=f"the file may hold {', '.join(DTYPES)}"
            )
    header, entries = _layout(specs, {_METADATA: metadata})
    file.write(header)
    for name in entries:
        for chunk in _chunks(tensors[name]):
            file.write(chunk)


def sync_folder(folder: Path) -> None:
    """Put a folder's list of names on disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def open_plain(path: Path) -> Iterator[tuple[int, int]]:
    """Open a plain file, no link, pipe or device; give its descriptor and size."""
    try:
        # Without O_NONBLOCK, opening a pipe would wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise damaged(path, "is not a plain file")
            yield descriptor, status.st_size
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOENT):
            found = "a symbolic link, expected a plain file" if error.errno == errno.ELOOP else "missing"
            raise damaged(path, f"is {found}") from error
        raise disk_error(f"`{path}` cannot be read", error) from error


def damaged(path: Path, problem: str) -> SnapshotError:
    """Build the error for a file that is not what was written."""
    return SnapshotError(f"`{path}` {problem}", hint=_OLDER)


def disk_error(what: str, error: OSError) -> SnapshotError:
    """Build the error for what the operating system refused."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        hint = "free some space, keep fewer checkpoints, or write them to a larger disk"
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        hint = "give the process the right to use that folder"
    else:
        hint = "check the disk"
    return SnapshotError(f"{what}: {error.strerror or error}", hint=hint)


def _layout(
    specs: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]],
    metadata: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[bytes, dict[str, Entry]]:
    """Give each tensor its place, and the header (with its length) that says so."""
    entries: dict[str, Entry] = {}
    at = 0
    for name, (dtype, shape) in sorted(specs.items(), key=lambda item: -item[1][0].itemsize):
        entries[name] = Entry(dtype, shape, at, at + math.prod(shape) * dtype.itemsize)
        at = entries[name].stop
    described = {
        name: {"dtype": _NAMES[entry.dtype], "shape": entry.shape, "data_offsets": (entry.start, entry.stop)}
        for name, entry in entries.items()
    }
    header = msgspec.json.encode({**metadata, **described})
    header += b" " * (-(8 + len(header)) % 64)
    return len(header).to_bytes(8, "little") + header, entries


def _chunks(values: NDArray[Any]) -> Iterator[memoryview]:
    """The bytes of an array in C order, little-endian; an array that lies in that order is not copied."""
    flat = values.reshape(-1) if values.flags.c_contiguous else values.flat
    stride = CHUNK_BYTES // values.itemsize
    for first in range(0, values.size, stride):
        piece = np.asarray(flat[first : first + stride])
        yield piece.astype(values.dtype.newbyteorder("<"), copy=False).view(np.uint8).data


class _Described(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: Annotated[list[Size], Meta(max_length=32)]
    data_offsets: tuple[Size, Size]


def _parse_header(header: bytes, data_bytes: int) -> dict[str, Entry]:
    """Read a header; a `ValueError` says what is wrong with it."""
    # Values stay raw at first: what has the wrong shape is refused before objects are made of it.
    values = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
    metadata = values.pop(_METADATA, None)
    if metadata is not None:
        msgspec.json.decode(metadata, type=dict[str, str])
    entries = {name: _entry(name, msgspec.json.decode(raw, type=_Described)) for name, raw in values.items()}
    json.loads(header.decode(), object_pairs_hook=_refuse_repeats)
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1][2:]):
        if entry.start != end:
            raise ValueError(f"tensor {name[:80]!a} begins at {entry.start}, expected {end}")
        end = entry.stop
    if end != data_bytes:
        raise ValueError(f"its tensors have {end} bytes, the file has {data_bytes}")
    return entries


def _entry(name: str, described: _Described) -> Entry:
    dtype = DTYPES.get(described.dtype)
    if dtype is None:
        raise ValueError(f"tensor {name[:80]!a} has the unknown dtype {described.dtype[:80]!a}")
    start, stop = described.data_offsets
    if stop - start != math.prod(described.shape) * dtype.itemsize:
        raise ValueError(f"tensor {name[:80]!a} lies at {start} to {stop}, which is not what its shape needs")
    return Entry(dtype, tuple(described.shape), start, stop)


def _refuse_repeats(pairs: list[tuple[str, Any]]) -> None:
    if len(dict(pairs)) != len(pairs):
        raise ValueError("a name is there twice")
