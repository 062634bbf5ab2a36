"""A worker's part of checkpoints: reports of shards in whatever order they come, and files that fail."""

import queue
import threading
from pathlib import Path

import msgspec
import numpy as np

from shoestring.checkpoint.owner import take_over
from shoestring.checkpoint.saver import Saver
from shoestring.checkpoint.schedule import Schedule
from shoestring.checkpoint.snapshot import Snapshot, TensorFileWriter, newest, step_folder
from shoestring.checkpoint.worker import WorkerState, read_worker
from shoestring.wire import messages as say


class Shards:
    """Stands for the exchange: hands over the reports it was given."""

    def __init__(self) -> None:
        self.reports: list[tuple[say.Snapped, bytes]] = []
        self.expected: list[int] = []
        self._own: queue.SimpleQueue[object] = queue.SimpleQueue()

    def report(self, seq: int, *records: object) -> None:
        self.reports.append((say.Snapped(seq), msgspec.json.encode(records)))

    def refuse(self, seq: int, why: str) -> None:
        self.reports.append((say.Snapped(seq, why), b""))

    def send_record(self, seq: int, record: bytes) -> None:
        self._own.put(msgspec.json.decode(record))

    def own(self) -> object:
        """The next record that the worker sends."""
        return self._own.get(timeout=30)

    def expect_reports(self, seq: int) -> None:
        self.expected.append(seq)

    def poll_reports(self):
        taken, self.reports = self.reports, []
        return taken

    def wait_report(self, timeout_s: float) -> None: ...


class Script:
    """Stands for a training script; its learning rate changes between rounds and steps."""

    rate = 1.0

    def values(self, steps: int) -> WorkerState:
        return WorkerState(steps=steps, buffers={"mean": np.full(3, steps, np.float32)})

    def add_schedules(self, state: WorkerState) -> None:
        state.groups = [{"lr": self.rate}]

    def model_facts(self) -> dict:
        return {"table": [], "aliases": {}}


class Run:
    """A saver, and what stands around it."""

    def __init__(self, root: Path, *, worker: int = 0) -> None:
        self.shards, self.script = Shards(), Script()
        self.notices: list[tuple[str, threading.Thread]] = []
        self.completed: list[int] = []
        self.saver = Saver(
            root,
            self.script,
            self.shards,
            schedule=Schedule(4),
            worker=worker,
            workers=2,
            shards=2,
            retain=3,
            save_timeout_s=60.0,
            notice=lambda text: self.notices.append((text, threading.current_thread())),
            log=lambda event, **fields: self.completed.append(fields["step"]),
        )

    @property
    def said(self) -> list[str]:
        return [text for text, _ in self.notices]

    def save(self, seq: int) -> object:
        """Save a round; return what the worker reported."""
        self.saver.round_ended(seq, seq)
        self.saver.step_begins()
        return self.shards.own()


class Round(int):
    """A round's number by which two threads take turns, whatever their speed.

    The writer's thread stops when it names the folder, and fails, as on a full disk, once the
    training thread looks the round up; that one goes on when the writer's thread has ended.
    """

    is_armed = False

    def __init__(self, _: int) -> None:
        self._named = threading.Event()
        self._looked_up = threading.Event()
        self._writer = threading.current_thread()

    def __format__(self, form: str) -> str:
        if form == "09d":
            self._writer = threading.current_thread()
            self._named.set()
            assert self._looked_up.wait(30)
            raise OSError("disk full")
        return super().__format__(form)

    def __eq__(self, other: object) -> bool:
        return super().__eq__(other)

    def __hash__(self) -> int:
        if self.is_armed and threading.current_thread() is threading.main_thread():
            assert self._named.wait(30)
            self._looked_up.set()
            self._writer.join(30)
        return super().__hash__()


def write_shard(root: Path, seq: int, index: int) -> object:
    folder = step_folder(root, seq)
    folder.mkdir(parents=True, exist_ok=True)
    with TensorFileWriter(folder / f"shard-{index}.safetensors", {}) as writer:
        return msgspec.to_builtins(writer.finish({"parts": {}}))


def test_a_checkpoint_is_complete_when_all_shards_have_reported(tmp_path):
    run = Run(tmp_path)
    own = run.save(4)
    run.shards.report(4, write_shard(tmp_path, 4, 0), own)
    run.saver.round_ended(5, 5)
    assert newest(tmp_path)[0] is None
    run.shards.report(4, write_shard(tmp_path, 4, 1))
    run.saver.close()
    assert run.completed == run.shards.expected == [4]
    manifest = Snapshot(step_folder(tmp_path, 4)).manifest
    assert [file.name for file in manifest.files] == [
        "shard-0.safetensors",
        "shard-1.safetensors",
        "worker-0.safetensors",
    ]
    assert manifest.facts == {"table": [], "aliases": {}, "steps": 4}
    assert (manifest.step, manifest.workers, manifest.shards) == (4, 2, 2)


def test_schedulers_are_taken_when_the_next_step_begins(tmp_path):
    run = Run(tmp_path)
    run.saver.round_ended(4, 4)
    run.script.rate = 0.5  # the script's scheduler
    run.saver.step_begins()
    run.shards.report(4, write_shard(tmp_path, 4, 0), run.shards.own())
    run.shards.report(4, write_shard(tmp_path, 4, 1))
    run.saver.close()
    state = read_worker(Snapshot(step_folder(tmp_path, 4)), 0)
    assert state.groups == [{"lr": 0.5}]
    np.testing.assert_array_equal(state.buffers["mean"], [4, 4, 4])


def test_rounds_that_are_not_due_are_not_saved(tmp_path):
    run = Run(tmp_path)
    for seq in (1, 2, 3, 5):
        run.saver.round_ended(seq, seq)
        run.saver.step_begins()
    run.saver.close()
    assert not list(tmp_path.glob("step-*"))


def test_what_is_left_of_a_run_completes_no_checkpoint_after_another_took_over(tmp_path):
    take_over(tmp_path)
    run = Run(tmp_path)
    run.save(4)
    take_over(tmp_path)
    for index in range(2):
        run.shards.report(4, write_shard(tmp_path, 4, index))
    run.saver.close()
    assert newest(tmp_path)[0] is None
    assert "another run has taken over" in run.said[0]


def test_a_shard_that_is_done_before_the_worker_ended_the_round_is_remembered(tmp_path):
    run = Run(tmp_path)
    run.shards.report(4, write_shard(tmp_path, 4, 1))
    own = run.save(4)  # the second shard had written its file by now
    assert newest(tmp_path)[0] is None
    run.shards.report(4, write_shard(tmp_path, 4, 0), own)
    run.saver.close()
    assert newest(tmp_path)[0].folder == step_folder(tmp_path, 4)
    run.shards.report(4, write_shard(tmp_path, 4, 0), own)  # said again: nothing happens
    run.saver.close()
    assert (run.completed, run.said) == ([4], [])


def test_a_report_that_comes_twice_counts_once(tmp_path):
    run = Run(tmp_path)
    own = run.save(4)
    for _ in range(2):
        run.shards.report(4, write_shard(tmp_path, 4, 0), own)
    run.saver.round_ended(5, 5)
    assert newest(tmp_path)[0] is None
    run.shards.report(4, write_shard(tmp_path, 4, 1))
    run.saver.close()
    assert (run.completed, run.said) == ([4], [])


def test_what_a_shard_could_not_write_is_said_once_and_not_waited_for(tmp_path):
    run = Run(tmp_path)
    run.save(4)
    run.shards.refuse(4, "disk full")
    run.shards.refuse(4, "disk full")
    run.saver.close()
    assert run.said == ["checkpoint 4 was not written, training goes on: disk full"]


def test_a_report_that_cannot_be_read_gives_the_checkpoint_up(tmp_path):
    run = Run(tmp_path)
    run.save(4)
    run.shards.reports.append((say.Snapped(4), b"[{"))
    run.saver.close()
    assert len(run.said) == 1
    assert "the report of its files cannot be read" in run.said[0]


def test_an_earlier_checkpoint_is_not_waited_for_once_a_later_one_is_complete(tmp_path):
    run = Run(tmp_path)
    run.save(4)
    run.saver.round_ended(8, 8)
    run.shards.report(8, write_shard(tmp_path, 8, 0))
    run.shards.report(8, write_shard(tmp_path, 8, 1))
    run.saver.close()
    assert run.completed == [8]
    assert run.said == ["checkpoint 4 was not written, training goes on: checkpoint 8 was complete before it"]


def test_a_file_that_cannot_be_written_is_given_up_by_the_training_thread(tmp_path):
    """The writer's thread changes nothing that the training thread looks at."""
    run = Run(tmp_path)
    seq = Round(4)
    run.saver.round_ended(seq, 4)
    run.saver.step_begins()
    seq.is_armed = True
    run.saver.round_ended(5, 5)  # while it goes through the rounds, the file of one cannot be written
    seq.is_armed = False
    run.saver.round_ended(6, 6)
    assert run.said == ["checkpoint 4 was not written, training goes on: disk full"]
    assert [thread for _, thread in run.notices] == [threading.main_thread()]
    run.saver.close()


def test_other_workers_ask_for_no_reports_and_do_not_wait_at_the_end(tmp_path):
    run = Run(tmp_path, worker=1)
    run.save(4)
    run.saver.close()
    assert run.shards.expected == []
    assert (run.completed, run.said) == ([], [])


def test_another_worker_completes_checkpoints_when_the_first_is_gone(tmp_path):
    run = Run(tmp_path, worker=1)
    run.save(4)
    own = run.save(8)
    run.shards.report(8, write_shard(tmp_path, 8, 0), own)
    run.shards.report(8, write_shard(tmp_path, 8, 1))
    run.saver.close()
    assert (run.completed, run.said) == ([8], [])
