"""Save one worker's state when a checkpoint is due, and complete the checkpoints whose files are there.

It is taken in two moments: the values when the round ends, the schedulers when the next step
begins, because a script moves them on in between. The file is written by a thread while training
goes on; all else happens in the training thread. Whatever fails, training goes on and says so.

`Reports`, `Feedback` and `Capture` are all that saving and resuming need of the rest of a worker.
"""

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import msgspec

from shoestring.checkpoint.completion import Completion
from shoestring.checkpoint.schedule import Schedule
from shoestring.checkpoint.snapshot import FileRecord
from shoestring.checkpoint.worker import Tensors, WorkerState, WorkerWriter
from shoestring.errors import ShoestringError
from shoestring.wire.messages import Snapped

_WAIT_S = 0.2


class Reports(Protocol):
    """What is said to shards, and heard from them, about checkpoints: the worker's exchange."""

    def send_record(self, seq: int, record: bytes) -> None:
        """Tell the first shard of this worker's file. Any thread may call it."""

    def expect_reports(self, seq: int) -> None:
        """See to it that every shard's report on a round comes in."""

    def poll_reports(self) -> Iterable[tuple[Snapped, bytes]]:
        """Take out the reports that have come in: each a JSON list of `FileRecord`s, or an error.

        A report may come before the worker has ended the round, and more than once.
        """

    def wait_report(self, timeout_s: float) -> None:
        """Return when there is a report, or after so long; raise if no report can come any more."""


class Feedback(Protocol):
    """The coder of pushes, which holds what was not sent yet and this worker's share of statistics."""

    def state(self) -> Tensors:
        """Copies of it, by names that are the same in every process."""

    def load(self, state: Tensors) -> None:
        """Go on from what `state` gave; names that are not known are ignored."""


class Capture(Protocol):
    """Takes the state of a training script."""

    def values(self, steps: int) -> WorkerState:
        """Copy what the end of a round has left, all but learning rates and schedulers."""

    def add_schedules(self, state: WorkerState) -> None:
        """Add learning rates, and what was given to `keep`."""

    def model_facts(self) -> dict[str, Any]:
        """What the manifest says about the model."""


class Saver:
    """Saves one worker's state in every round that is due. Used by the training thread."""

    def __init__(
        self,
        root: Path,
        capture: Capture,
        reports: Reports,
        *,
        schedule: Schedule,
        worker: int,
        workers: int,
        shards: int,
        retain: int,
        save_timeout_s: float,
        notice: Callable[[str], None],
        log: Callable[..., None],
    ) -> None:
        self._capture = capture
        self._reports = reports
        self._schedule = schedule
        self._is_first = worker == 0
        self._save_timeout_s = save_timeout_s
        self._notice = notice
        self._log = log
        self._taken: tuple[int, WorkerState] | None = None
        self._writer = WorkerWriter(root, worker, self._send_record)
        self._completion = Completion(root, workers=workers, shards=shards, retain=retain)

    def round_ended(self, seq: int, steps: int) -> None:
        """Take the values of a round that is to be saved."""
        self._settle()
        if not self._schedule.is_due(seq):
            return
        self._taken = (seq, self._capture.values(steps))
        overtaken = self._completion.expect(seq, steps)
        self._pass_over(overtaken, f"its files were not there when checkpoint {seq} began")
        if self._is_first:
            self._reports.expect_reports(seq)

    def step_begins(self) -> None:
        """Take the schedulers of the round before, and write."""
        if self._taken is None:
            return
        (seq, state), self._taken = self._taken, None
        self._capture.add_schedules(state)
        self._writer.write(seq, state)

    def close(self) -> None:
        """Finish what was begun: the run's last checkpoint is complete when this returns, or given up."""
        self.step_begins()
        self._writer.wait(self._save_timeout_s)
        self._settle()
        deadline = time.monotonic() + self._save_timeout_s
        while self._is_first and self._completion.is_waiting and time.monotonic() < deadline:
            self._reports.wait_report(_WAIT_S)
            self._settle()

    def _send_record(self, seq: int, record: FileRecord) -> None:
        self._reports.send_record(seq, msgspec.json.encode(record))

    def _settle(self) -> None:
        """Take in what was written, reported or failed; write the manifest of checkpoints that are whole."""
        for seq, why in self._writer.failures():
            self._give_up(seq, why)
        for message, files in self._reports.poll_reports():
            if message.error:
                self._give_up(message.round, message.error)
                continue
            try:
                self._completion.report(message.round, msgspec.json.decode(files, type=list[FileRecord]))
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                self._give_up(message.round, f"the report of its files cannot be read: {error}")
        while (whole := self._completion.first_whole()) is not None:
            self._complete(whole)

    def _complete(self, seq: int) -> None:
        try:
            folder, overtaken = self._completion.complete(seq, self._capture.model_facts())
        except (ShoestringError, OSError) as error:
            self._give_up(seq, str(error))
            return
        self._pass_over(overtaken, f"checkpoint {seq} was complete before it")
        self._log("checkpoint", step=seq, folder=str(folder))

    def _give_up(self, seq: int, why: str) -> None:
        if self._completion.give_up(seq):
            self._say(seq, why)

    def _pass_over(self, rounds: list[int], why: str) -> None:
        if self._is_first:  # another worker does not know what the first one has completed
            for seq in rounds:
                self._say(seq, why)

    def _say(self, seq: int, why: str) -> None:
        self._notice(f"checkpoint {seq} was not written, training goes on: {why}")
