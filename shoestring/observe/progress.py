"""Show how a run goes: a table that stays on a terminal, plain lines anywhere else.

A `Board` takes events and keeps the latest state of each worker; a `Display`
shows it on stderr, so that stdout stays the training script's. A board is not
picky: events come from files, and a field that is missing or of another type
counts as not reported.
"""

import math
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

Event = Mapping[str, Any]

WINDOW_S = 10.0  # rates are those of about this time; a round of many local steps comes in bursts
LIVE_EVERY_S = 0.25
PLAIN_EVERY_S = 5.0

_WINDOW_EVENTS = 256
_NOTES = 100  # kept until a display takes them
_LAGGING_NAMED = 3
_MARKS = 16  # steps at known times, of each worker
_STALLED_S = 2.0  # later than an event was due
_LARGEST = 1e18


class Summary(NamedTuple):
    """Some workers together: the mean of their latest losses, the sums of their rates."""

    step: str
    loss: float | None
    samples_per_s: float | None
    up_mbit_s: float | None
    down_mbit_s: float | None
    compression: float | None

    @classmethod
    def of(cls, states: list["WorkerState"]) -> "Summary":
        """Sum up some workers, at least one; the step is that of the furthest."""
        furthest = max(states, key=lambda state: state.step)
        losses = [state.loss for state in states if state.loss is not None]
        sent_bytes = sum(state.sent_bytes for state in states)
        return cls(
            str(furthest.step) if furthest.total is None else f"{furthest.step}/{furthest.total}",
            sum(losses) / len(losses) if losses else None,
            _sum(state.samples_per_s for state in states),
            _sum(state.up_mbit_s for state in states),
            _sum(state.down_mbit_s for state in states),
            sum(state.float_bytes for state in states) / sent_bytes if sent_bytes else None,
        )

    def cells(self) -> list[str]:
        """The values as a row of the table, empty where none was reported."""
        rates = (self.samples_per_s, self.up_mbit_s, self.down_mbit_s)
        return [
            self.step,
            "" if self.loss is None else f"{self.loss:.4g}",
            *("" if rate is None else _short(rate) for rate in rates),
            "" if self.compression is None else _times(self.compression),
        ]


class Span(NamedTuple):
    """What one step event reports since the one before it."""

    seconds: float
    samples: float | None
    up_bytes: float
    down_bytes: float


@dataclass
class WorkerState:
    """What is known of one worker; None where it was never reported."""

    worker: int
    is_present: bool = True
    left_at: float | None = None  # by the wall clock, as it is told by shards too
    step: int = 0
    total: int | None = None
    loss: float | None = None
    codec: str | None = None
    # Of the latest event that sent anything: a ratio of what the codec in use does.
    float_bytes: float = 0.0
    sent_bytes: float = 0.0
    spans: deque[Span] = field(default_factory=lambda: deque(maxlen=_WINDOW_EVENTS))
    marks: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_MARKS))  # times and steps

    @property
    def samples_per_s(self) -> float | None:
        if all(span.samples is None for span in self.spans):
            return None
        return self._rate(span.samples or 0.0 for span in self.spans)

    @property
    def up_mbit_s(self) -> float | None:
        return self._rate(span.up_bytes * 8e-6 for span in self.spans)

    @property
    def down_mbit_s(self) -> float | None:
        return self._rate(span.down_bytes * 8e-6 for span in self.spans)

    @property
    def compression(self) -> float | None:
        """How many times smaller than float32 the bytes are, both ways together."""
        return self.float_bytes / self.sent_bytes if self.sent_bytes else None

    def step_at(self, moment: float) -> float:
        """The step it had come to, between the times at which it said so."""
        later = next((place for place, (at, _) in enumerate(self.marks) if at > moment), None)
        if not later:  # it has said nothing since, or had said nothing yet
            return self.step if later is None else self.marks[0][1]
        (begin, first), (end, last) = self.marks[later - 1], self.marks[later]
        return first + (last - first) * (moment - begin) / (end - begin)

    def _rate(self, amounts: Iterable[float]) -> float | None:
        seconds = sum(span.seconds for span in self.spans)
        return sum(amounts) / seconds if seconds > 0 else None


class Board:
    """The state of a run, told by its events."""

    def __init__(self) -> None:
        self.begun: set[int] = set()  # workers whose scripts have called `init`
        self._workers: dict[int, WorkerState] = {}
        self._notes: deque[str] = deque(maxlen=_NOTES)

    def add(self, event: Event) -> None:
        """Take one event; one of an unknown kind changes nothing.

        What the event's process has printed itself is not said again.
        """
        worker = _worker(event)
        is_new = event.get("is_printed") is not True
        match event.get("event"):
            case "init" if worker is not None:
                self.begun.add(worker)
            case "step" if worker is not None:
                self._step(self._state(worker), event)
            case "codec" if worker is not None:
                spec = self._state(worker).codec = _text(event, "spec")
                self._notes.append(f"{_who(event)} uses codec {spec}" + _because(event))
            case "join" if worker is not None:
                self._workers[worker] = WorkerState(worker)
                self._notes.append(f"worker {worker} joined")
            case "leave" if worker is not None:
                state = self._state(worker)
                if state.is_present:  # the shards say so too
                    self._notes.append(f"worker {worker} left")
                state.is_present, state.left_at = False, _number(event, "time")
            case "skip" if is_new:
                step, tensor = _text(event, "step"), _text(event, "tensor")
                self._notes.append(f"{_who(event)} skipped step {step}: NaN or infinity in {tensor}")
            case "checkpoint":
                step, folder = _text(event, "step"), _text(event, "folder")
                seconds = _number(event, "seconds")
                took = "" if seconds is None else f" ({_short(seconds)} s)"
                self._notes.append(f"checkpoint of step {step} in {folder}{took}")
            case "warn" if is_new:
                self._notes.append(f"warning from {_who(event)}: {_text(event, 'text')}")

    @property
    def workers(self) -> list[WorkerState]:
        """All workers, by number."""
        return [self._workers[worker] for worker in sorted(self._workers)]

    @property
    def current(self) -> list[WorkerState]:
        """The workers that sums are made of: those present, or all when the last has left."""
        return [state for state in self.workers if state.is_present] or self.workers

    def lag(self, worker: int) -> int | None:
        """How many rounds a worker is behind the furthest; None for one that left or never reported."""
        state = self._workers[worker]
        if not state.is_present or not state.spans:
            return None
        moment = self._common_moment()
        return round(max(other.step_at(moment) for other in self.current) - state.step_at(moment))

    def _common_moment(self) -> float:
        """The latest time until which all have told their steps, but for those that are overdue."""
        told = [(state.marks[-1][0], state.spans[-1].seconds) for state in self.current if state.marks]
        latest = max((at for at, _ in told), default=0.0)
        return min((at for at, seconds in told if latest - at <= _STALLED_S + 2 * seconds), default=0.0)

    def take_notes(self) -> list[str]:
        """Return what happened besides steps since this was last called, a line each."""
        notes = list(self._notes)
        self._notes.clear()
        return notes

    def line(self) -> str:
        """Write the whole state in one line; empty before the first step.

        A lag of one is not named: files read one after the other make as much.
        """
        states = self.current
        if not any(state.spans for state in states):
            return ""
        all_ = Summary.of(states)
        parts = [f"step {all_.step}"]
        if all_.loss is not None:
            parts.append(f"loss {all_.loss:.4g}")
        if all_.samples_per_s:
            parts.append(f"{_short(all_.samples_per_s)} samples/s")
        if all_.up_mbit_s is not None and all_.down_mbit_s is not None:
            parts += [f"up {_short(all_.up_mbit_s)} Mbit/s", f"down {_short(all_.down_mbit_s)} Mbit/s"]
        if all_.compression is not None:
            smaller = f"{_times(all_.compression)} smaller"
            parts.append(smaller if all_.compression >= 1.05 else "uncompressed")
        lags = [(lag, state.worker) for state in states if (lag := self.lag(state.worker) or 0) > 1]
        lags.sort(key=lambda entry: (-entry[0], entry[1]))
        if lags:
            named = ", ".join(f"worker {worker} lags {lag}" for lag, worker in lags[:_LAGGING_NAMED])
            more = len(lags) - _LAGGING_NAMED
            parts.append(named + (f" and {more} more" if more > 0 else ""))
        return "  ".join(parts)

    def table(self) -> Table:
        """Lay out the state as a table: all workers together first, then one a row, then the codecs."""
        codecs = Text("\n".join(self._codecs()))  # too long for a column of 80
        table = Table(box=SIMPLE_HEAD, pad_edge=False, caption=codecs, caption_justify="left")
        for name in ("worker", "step", "loss", "samples/s", "up\nMbit/s", "down\nMbit/s", "smaller", "lag"):
            table.add_column(name, justify="right", no_wrap=True)
        states = self.current
        if len(states) > 1:
            table.add_row("all", *Summary.of(states).cells(), style="bold")
        for state in self.workers:
            lag = self.lag(state.worker)
            table.add_row(
                str(state.worker),
                *Summary.of([state]).cells(),
                "left" if not state.is_present else "" if lag is None else str(lag),
                style=None if state.is_present else "dim",
            )
        return table

    def _codecs(self) -> list[str]:
        users: dict[str, list[str]] = {}
        for state in self.current:
            if state.codec is not None:
                users.setdefault(state.codec, []).append(str(state.worker))
        if len(users) == 1:
            return [f"codec {codec}" for codec in users]
        return [f"codec {codec} (worker {', '.join(workers)})" for codec, workers in users.items()]

    def _state(self, worker: int) -> WorkerState:
        return self._workers.setdefault(worker, WorkerState(worker))

    def _step(self, state: WorkerState, event: Event) -> None:
        def amount(name: str) -> float:
            return max(_number(event, name) or 0.0, 0.0)

        if state.left_at is None or (_number(event, "time") or math.inf) > state.left_at:
            state.is_present = True  # else it is read later than it was written
        state.step = _whole(event, "step") or state.step
        state.total = _whole(event, "total")
        loss = _number(event, "loss")
        state.loss = state.loss if loss is None else loss
        if isinstance(event.get("codec"), str):
            state.codec = _text(event, "codec")
        sent_bytes = amount("up_bytes") + amount("down_bytes")
        if sent_bytes:
            state.sent_bytes = sent_bytes
            state.float_bytes = amount("up_float_bytes") + amount("down_float_bytes")
        at = _number(event, "time")
        if at is not None:
            state.marks.append((at, state.step))
        spans = state.spans
        samples = None if _number(event, "samples") is None else amount("samples")
        spans.append(Span(amount("seconds"), samples, amount("up_bytes"), amount("down_bytes")))
        while sum(span.seconds for span in spans) - spans[0].seconds >= WINDOW_S:
            spans.popleft()


class Display:
    """Shows a board on stderr. Any thread may print; one refreshes.

    `every_s` is the least time between two tables or lines: by default a quarter
    of a second for a table and five for lines. `is_live` and `clock` are for tests.
    """

    def __init__(
        self,
        board: Board,
        *,
        every_s: float | None = None,
        console: Console | None = None,
        is_live: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._board = board
        self._console = console or Console(stderr=True)
        if is_live is None:
            # Asked of the file itself: the console also says yes for FORCE_COLOR in a pipe.
            is_live = self._console.file.isatty() and not self._console.is_dumb_terminal
        self._is_live = is_live
        self._every_s = every_s if every_s is not None else LIVE_EVERY_S if is_live else PLAIN_EVERY_S
        self._clock = clock
        self._lock = threading.Lock()
        self._live: Live | None = None
        self._shown_at = -math.inf
        self._shown = ""

    def refresh(self) -> None:
        """Show what is new: notes at once, the state if `every_s` have passed."""
        self._show(is_last=False)

    def print(self, line: str, *, to_stderr: bool = False) -> None:
        """Print a line of the training script, whole, on its own stream, above the table if there is one."""
        line = line.rstrip("\r\n")
        stream = sys.stderr if to_stderr else sys.stdout
        with self._lock:
            if self._live is not None and stream.isatty():
                self._console.print(Text.from_ansi(line), soft_wrap=True)
            else:
                stream.write(line + "\n")
                stream.flush()

    def close(self) -> None:
        """Show the last state and leave it there."""
        self._show(is_last=True)
        with self._lock:
            if self._live is not None:
                self._live.stop()
                self._live = None

    def __enter__(self) -> "Display":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _show(self, *, is_last: bool) -> None:
        with self._lock:
            for note in self._board.take_notes():
                self._say(note)
            line = self._board.line()
            now = self._clock()
            is_due = is_last or now - self._shown_at >= self._every_s
            if not line or not is_due or (line == self._shown and not self._is_live):
                return
            self._shown, self._shown_at = line, now
            if self._is_live:
                self._draw()
            else:
                self._say(line)

    def _say(self, line: str) -> None:
        if self._live is not None:
            self._console.print(Text(line), soft_wrap=True)
        else:
            self._console.file.write(line + "\n")
            self._console.file.flush()

    def _draw(self) -> None:
        if self._live is None:
            # What the launcher itself prints goes above the table; a redirected stdout stays as it is.
            self._live = Live(console=self._console, auto_refresh=False, redirect_stdout=sys.stdout.isatty())
            self._live.start()
        self._live.update(self._board.table(), refresh=True)


def _worker(event: Event) -> int | None:
    worker = event.get("worker")
    if isinstance(worker, int) and 0 <= worker < _LARGEST:
        return worker
    named = re.fullmatch(r"worker-([0-9]{1,9})", str(event.get("who")))
    return int(named[1]) if named else None


def _who(event: Event) -> str:
    worker = _worker(event)
    return _text(event, "who") if worker is None else f"worker {worker}"


def _because(event: Event) -> str:
    return f" ({_text(event, 'why')})" if event.get("why") else ""


def _number(event: Event, name: str) -> float | None:
    value = event.get(name)
    # NaN, infinity and integers beyond any float fail the comparison.
    return float(value) if isinstance(value, int | float) and -_LARGEST < value < _LARGEST else None


def _whole(event: Event, name: str) -> int | None:
    value = event.get(name)
    return value if isinstance(value, int) and 0 <= value < _LARGEST else None


def _text(event: Event, name: str) -> str:
    """A field as text of one line: no control characters reach the terminal."""
    return "".join(sign if sign.isprintable() else " " for sign in str(event.get(name, "?")))


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _short(value: float) -> str:
    """Three digits or so: 1830, 12.3, 0.04."""
    if value >= 99.95:
        return f"{value:.0f}"
    if value >= 1:
        return f"{value:.1f}"
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _times(ratio: float) -> str:
    return f"{ratio:.0f}x" if ratio >= 9.95 else f"{ratio:.1f}x"
