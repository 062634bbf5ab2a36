"""Events are written whole or not at all, and never stop what they tell of."""

import json
import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from shoestring.errors import UsageError
from shoestring.observe.events import LINE_BYTES, EventLog, Tail


def fields(event):
    """An event without its times, which differ from run to run."""
    return {name: value for name, value in event.items() if name not in ("time", "at")}


def names(events):
    return [event["event"] for event in events]


def test_events_come_back_as_they_were_written(tmp_path):
    log = EventLog(tmp_path / "run" / "events", "worker-0")
    log.write("step", step=1, loss=0.5, codec="dct", total=None)
    log.write("warn", text="line\nbreak, `ü` and \0")
    log.close()
    events = Tail(tmp_path / "run" / "events").poll()
    assert [fields(event) for event in events] == [
        {"who": "worker-0", "event": "step", "step": 1, "loss": 0.5, "codec": "dct", "total": None},
        {"who": "worker-0", "event": "warn", "text": "line\nbreak, `ü` and \0"},
    ]
    assert list(events[0])[:4] == ["time", "at", "who", "event"]
    assert events[0]["at"] <= events[1]["at"]


def test_what_json_does_not_know(tmp_path):
    class Odd:
        def __str__(self):
            return "odd"

    with EventLog(tmp_path, "worker-0") as log:
        log.write(
            "step",
            a=float("nan"),
            b=[float("-inf")],
            c=np.float32(0.25),
            d=np.float32("nan"),
            e=Odd(),
            f=2**70,
        )
    (event,) = Tail(tmp_path).poll()
    assert [event[name] for name in "abcdef"] == [None, [None], 0.25, None, "odd", 2**70]


def test_an_event_that_cannot_be_written_leaves_a_warning(tmp_path):
    class Broken:
        def __str__(self):
            raise RuntimeError("no text")

    endless: list[object] = []
    endless.append(endless)
    with EventLog(tmp_path, "worker-0") as log:
        log.write("first", value=Broken())
        log.write("second", value=endless)
        log.write("third", value="\ud800")
        log.write("fourth", value="x" * LINE_BYTES)
        log.write("step")
    events = Tail(tmp_path).poll()
    assert names(events) == ["warn"] * 4 + ["step"]
    for event, name in zip(events, ["first", "second", "third", "fourth"], strict=False):
        assert f"event '{name}' could not be written" in event["text"]


def test_fields_do_not_replace_the_head(tmp_path):
    with EventLog(tmp_path, "shard-1") as log:
        log.write("join", who="worker-0", time="never", event="leave")
    (event,) = Tail(tmp_path).poll()
    assert (event["who"], event["event"]) == ("shard-1", "join")
    assert isinstance(event["time"], float)


def test_without_a_folder_events_are_dropped(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with EventLog(None, "worker-0") as log:
        log.write("step", step=1)
    assert list(tmp_path.iterdir()) == []


def test_writing_after_close_is_dropped(tmp_path):
    log = EventLog(tmp_path, "worker-0")
    log.write("step")
    log.close()
    log.write("step")
    log.close()
    assert names(Tail(tmp_path).poll()) == ["step"]


@pytest.mark.parametrize("who", ["", "../worker", "a/b", ".hidden", "worker 0", "x" * 101])
def test_names_that_are_no_file_names_are_refused(tmp_path, who):
    with pytest.raises(UsageError, match="cannot name an event file"):
        EventLog(tmp_path, who)


def test_a_full_disk_ends_the_log_with_one_warning(tmp_path, capsys):
    (tmp_path / "events-worker-0.jsonl").symlink_to("/dev/full")
    with EventLog(tmp_path, "worker-0") as log:
        log.write("step", step=1)
        log.write("step", step=2)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "no more events of `worker-0`" in captured.err


def test_a_folder_that_cannot_be_made_ends_the_log_with_one_warning(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    with EventLog(tmp_path / "file", "worker-0") as log:
        log.write("step", step=1)
    assert capsys.readouterr().err.count("\n") == 1


def test_a_line_that_fits_only_in_part_is_taken_back(tmp_path):
    """The limit on a file's size makes the kernel write a part of a line."""
    source = f"""
import resource
from pathlib import Path
from shoestring.observe.events import EventLog
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
log = EventLog(Path({str(tmp_path)!r}), "worker-0")
for step in range(100):
    log.write("step", step=step, text="x" * 40)
print("training goes on")
"""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "training goes on\n")
    assert done.stderr.count("\n") == 1
    content = (tmp_path / "events-worker-0.jsonl").read_bytes()
    assert content.endswith(b"\n")
    steps = [json.loads(line)["step"] for line in content.splitlines()]
    assert steps == list(range(len(steps)))
    assert len(steps) > 1


def test_threads_write_whole_lines(tmp_path):
    threads, each = 8, 200
    log = EventLog(tmp_path, "worker-0")

    def write(thread: int) -> None:
        for step in range(each):
            log.write("step", thread=thread, step=step, text="x" * (step * 7 % 300))

    running = [threading.Thread(target=write, args=(thread,)) for thread in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(60)
    log.close()
    events = [json.loads(line) for line in (tmp_path / "events-worker-0.jsonl").read_bytes().splitlines()]
    assert len(events) == threads * each
    for thread in range(threads):
        assert [event["step"] for event in events if event["thread"] == thread] == list(range(each))
    times = [event["at"] for event in events]
    assert times == sorted(times)


def test_reading_passes_over_what_is_no_event(tmp_path):
    path = tmp_path / "events-worker-0.jsonl"
    path.write_bytes(
        b'{"event":"a"}\n\n[1]\n{"event":\n\xff\n' + b"[" * 50_000 + b'\n{"event":"b"}\n{"event":"c"}'
    )
    assert names(Tail(tmp_path).poll()) == ["a", "b"]


def test_a_restarted_process_goes_on_after_a_broken_line(tmp_path):
    path = tmp_path / "events-worker-0.jsonl"
    path.write_bytes(b'{"event":"a"}\n{"event":"bro')
    with EventLog(tmp_path, "worker-0") as log:
        log.write("join")
    with EventLog(tmp_path, "worker-0") as log:
        log.write("step")
    assert names(Tail(tmp_path).poll()) == ["a", "join", "step"]
    assert path.read_bytes().count(b"\n") == 4


def test_tail_follows_files_that_appear_later(tmp_path):
    tail = Tail(tmp_path / "run")
    assert tail.poll() == []
    first = EventLog(tmp_path / "run", "worker-1")
    first.write("a")
    assert names(tail.poll()) == ["a"]
    assert tail.poll() == []
    second = EventLog(tmp_path / "run", "worker-0")
    second.write("b")
    second.write("c")
    first.write("d")
    assert names(tail.poll()) == ["b", "c", "d"]
    (tmp_path / "run" / "other.jsonl").write_text('{"event":"no"}\n')
    assert tail.poll() == []
    first.close()
    second.close()


def test_tail_waits_for_the_rest_of_a_line(tmp_path):
    path = tmp_path / "events-worker-0.jsonl"
    tail = Tail(tmp_path)
    lines = b'{"event":"a"}\n{"event":"b"}\n{"event":"\xc3\xbc"}\n'
    seen = []
    for cut in range(len(lines) + 1):
        path.write_bytes(lines[:cut])
        found = names(tail.poll())
        seen += found
        assert len(seen) == lines[:cut].count(b"\n")
    assert seen == ["a", "b", "ü"]


def test_tail_reads_far_more_than_one_piece(tmp_path):
    with EventLog(tmp_path, "worker-0") as log:
        for step in range(60):
            log.write("step", step=step, text="x" * 60_000)
    assert [event["step"] for event in Tail(tmp_path).poll()] == list(range(60))


def test_tail_passes_over_a_line_without_end(tmp_path):
    path = tmp_path / "events-worker-0.jsonl"
    path.write_bytes(b"x" * (3 << 20))
    tail = Tail(tmp_path)
    assert tail.poll() == []
    with path.open("ab") as file:
        file.write(b'\n{"event":"a"}\n')
    assert names(tail.poll()) == ["a"]


def test_tail_starts_again_where_a_file_was_replaced(tmp_path):
    path = tmp_path / "events-worker-0.jsonl"
    tail = Tail(tmp_path)
    path.write_text('{"event":"a"}\n{"event":"b"}\n')
    assert names(tail.poll()) == ["a", "b"]
    path.write_text('{"event":"c"}\n')
    assert names(tail.poll()) == ["c"]
    os.remove(path)
    assert tail.poll() == []
