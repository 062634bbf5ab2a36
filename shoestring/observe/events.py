"""Write down what each process of a run does, one JSON line an event, and read it back.

A run has a folder; every process appends to a file of its own there, such as
`events-worker-0.jsonl`. A line is there whole or not at all, and writing never
raises into training: where the disk is full the log ends with one warning.

Readers pass over what is not a whole event, such as the last line of a process
that was killed while writing it. `at` is monotonic time, for durations within
one process; `time` is the wall clock, for people.
"""

import contextlib
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from shoestring.errors import UsageError

PATTERN = "events-*.jsonl"
LINE_BYTES = 1 << 16  # the longest line that is written or read

_READ_BYTES = 1 << 20
_WHO = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


class EventLog:
    """Appends the events of one process to its file. Any thread may write."""

    def __init__(self, folder: Path | None, who: str) -> None:
        """Open `events-WHO.jsonl` in `folder`; without a folder, events are dropped."""
        if not _WHO.fullmatch(who):
            raise UsageError(
                f"`{who}` cannot name an event file",
                hint="use letters, digits, `-`, `_` and `.`, at most 100",
            )
        self._who = who
        # Reentrant: a signal handler may write while the same thread is writing.
        self._lock = threading.RLock()
        self._encoder = msgspec.json.Encoder(enc_hook=_plain)
        self._fd: int | None = None
        if folder is None:
            return
        self._path = folder / f"events-{who}.jsonl"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            if not _ends_whole(self._fd):
                self._append(b"\n")  # an earlier process died in its last line
        except OSError as error:
            self._stop(error)

    def write(self, event: str, /, **fields: object) -> None:
        """Append one event. NaN and infinity become null; what JSON does not know becomes text."""
        with self._lock:
            if self._fd is None:
                return
            try:
                line = self._encode(event, fields)
            except Exception as error:  # another class's `__str__`, or depth without end
                line = self._encode(
                    "warn", {"text": f"event {event!a} could not be written: {error!a}"[:1000]}
                )
            try:
                self._append(line)
            except OSError as error:
                self._stop(error)

    def close(self) -> None:
        """Close the file; later events are dropped."""
        with self._lock:
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None

    def __enter__(self) -> "EventLog":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _encode(self, event: str, fields: dict[str, object]) -> bytes:
        head = {"time": time.time(), "at": time.monotonic(), "who": self._who, "event": event}
        line = self._encoder.encode({**head, **fields, **head}) + b"\n"  # the head comes first, and wins
        if len(line) > LINE_BYTES:
            raise ValueError(f"{len(line)} bytes, expected {LINE_BYTES} at most")
        return line

    def _append(self, line: bytes) -> None:
        if self._fd is None:
            return
        written = os.write(self._fd, line)
        if written < len(line):  # the disk took a part: take it back, no other process writes here
            os.ftruncate(self._fd, os.fstat(self._fd).st_size - written)
            raise OSError(f"{written} of {len(line)} bytes could be written")

    def _stop(self, error: OSError) -> None:
        with contextlib.suppress(OSError):
            self.close()
        with contextlib.suppress(OSError, ValueError):  # stderr may be closed, or be what is full
            print(f"warning: no more events of `{self._who}` in `{self._path}`: {error}", file=sys.stderr)


class Tail:
    """Follows the event files of a folder, all or those of a pattern, also those that appear later."""

    def __init__(self, folder: Path, pattern: str = PATTERN) -> None:
        self._folder = folder
        self._pattern = pattern
        self._offsets: dict[Path, int] = {}

    def poll(self) -> list[dict[str, Any]]:
        """Return the events since the last poll: file by file, each in the order of its lines."""
        return [event for path in sorted(self._folder.glob(self._pattern)) for event in self._read(path)]

    def _read(self, path: Path) -> Iterator[dict[str, Any]]:
        offset = self._offsets.get(path, 0)
        try:
            size = path.stat().st_size
            if size == offset:
                return
            if size < offset:  # replaced by a shorter one: a new run in the same folder
                offset = 0
            with path.open("rb") as file:
                file.seek(offset)
                while piece := file.read(_READ_BYTES):
                    whole = piece.rfind(b"\n") + 1
                    if not whole and len(piece) == _READ_BYTES:
                        whole = len(piece)  # far longer than a line may be: pass over it
                    yield from filter(None, map(_read_line, piece[:whole].splitlines(keepends=True)))
                    offset += whole
                    self._offsets[path] = offset
                    if not whole:
                        return
                    file.seek(offset)
        except OSError:
            return  # removed meanwhile, or not readable yet


def _ends_whole(fd: int) -> bool:
    size = os.fstat(fd).st_size
    return size == 0 or os.pread(fd, 1, size - 1) == b"\n"


def _plain(value: Any) -> object:
    """Turn what JSON does not know into what it does: a NumPy or torch scalar into a number."""
    try:
        return value.item()
    except Exception:  # no scalar: any class may come here, and text always will do
        return str(value)


def _read_line(line: bytes) -> dict[str, Any] | None:
    if not line.endswith(b"\n"):
        return None
    try:
        event = msgspec.json.decode(line)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) else None
