"""What a launcher shows for given events, on a terminal and elsewhere."""

import io
import re
import sys

import pytest
from rich.console import Console

from shoestring.observe.progress import Board, Display


def step(worker, number, **changes):
    """A step event: one second, 915 samples, 0.6 Mbit up, 0.45 Mbit down, 42 times smaller."""
    event = {
        "time": 1.7e9,
        "at": 5.0,
        "who": f"worker-{worker}",
        "event": "step",
        "worker": worker,
        "step": number,
        "total": 400,
        "loss": 0.412,
        "samples": 915,
        "seconds": 1.0,
        "up_bytes": 75_000,
        "down_bytes": 56_250,
        "up_float_bytes": 75_000 * 42,
        "down_float_bytes": 56_250 * 42,
        "codec": "dct:block=16,step=1.5",
    }
    return event | changes


def board_of(*events):
    board = Board()
    for event in events:
        board.add(event)
    return board


@pytest.mark.parametrize(
    ("events", "line"),
    [
        ([], ""),
        ([{"event": "join", "worker": 0}], ""),
        (
            [step(0, 120), step(1, 117)],
            "step 120/400  loss 0.412  1830 samples/s  up 1.2 Mbit/s  down 0.9 Mbit/s  42x smaller"
            "  worker 1 lags 3",
        ),
        (
            [step(0, 7, total=None, loss=None, samples=None)],
            "step 7  up 0.6 Mbit/s  down 0.45 Mbit/s  42x smaller",
        ),
        (
            [step(0, 7, total=None, loss=None)],
            "step 7  915 samples/s  up 0.6 Mbit/s  down 0.45 Mbit/s  42x smaller",
        ),
        ([step(0, 1, seconds=0)], "step 1/400  loss 0.412  42x smaller"),
        (
            [step(0, 5, up_bytes=0, down_bytes=0, loss=2.0), step(1, 4, up_bytes=0, down_bytes=0, loss=1.0)],
            "step 5/400  loss 1.5  1830 samples/s  up 0 Mbit/s  down 0 Mbit/s",
        ),
        (
            [step(0, 5, up_float_bytes=75_000, down_float_bytes=56_250, samples=12)],
            "step 5/400  loss 0.412  12.0 samples/s  up 0.6 Mbit/s  down 0.45 Mbit/s  uncompressed",
        ),
        (
            [
                step(worker, 20 - 2 * worker, samples=0, up_bytes=0, down_bytes=0, loss=1)
                for worker in range(6)
            ],
            "step 20/400  loss 1  up 0 Mbit/s  down 0 Mbit/s"
            "  worker 5 lags 10, worker 4 lags 8, worker 3 lags 6 and 2 more",
        ),
    ],
)
def test_line(events, line):
    assert board_of(*events).line() == line


def test_state_of_each_worker():
    first, second = board_of(step(1, 8, loss=None), step(0, 10, total=None)).workers
    assert (first.worker, first.step, first.total, first.loss) == (0, 10, None, 0.412)
    assert (second.worker, second.step, second.total, second.loss) == (1, 8, 400, None)
    for state in (first, second):
        assert state.samples_per_s == 915
        assert state.up_mbit_s == pytest.approx(0.6, rel=1e-12)
        assert state.down_mbit_s == pytest.approx(0.45, rel=1e-12)
        assert state.compression == 42
        assert state.codec == "dct:block=16,step=1.5"


def test_rates_are_those_of_the_last_ten_seconds():
    board = board_of(*(step(0, number, samples=1000) for number in range(20)))
    (state,) = board.workers
    for number in range(20, 29):
        board.add(step(0, number, samples=0))
    assert state.samples_per_s == 100  # one event of ten is left
    board.add(step(0, 29, samples=0))
    assert state.samples_per_s == 0
    board.add(step(0, 30, samples=50, seconds=25))
    assert state.samples_per_s == 2  # a long event stands alone


def test_many_short_steps_take_bounded_memory():
    board = board_of(*(step(0, number, seconds=1e-4, samples=1) for number in range(5000)))
    (state,) = board.workers
    assert len(state.spans) <= 256
    assert state.samples_per_s == pytest.approx(1e4, rel=1e-9)


def test_compression_is_kept_through_steps_that_send_nothing():
    nothing = dict.fromkeys(("up_bytes", "down_bytes", "up_float_bytes", "down_float_bytes"), 0)
    board = board_of(step(0, 1), step(0, 2, **nothing), step(0, 3, loss=None, **nothing))
    (state,) = board.workers
    assert (state.compression, state.loss) == (42, 0.412)


def test_lag_counts_workers_that_are_there():
    board = board_of(step(0, 100), step(1, 99), step(2, 90), {"event": "join", "worker": 3})
    assert [board.lag(worker) for worker in range(4)] == [0, 1, 10, None]
    assert board.line().endswith("smaller  worker 2 lags 10")
    board.add({"event": "leave", "worker": 0})
    assert [board.lag(worker) for worker in range(4)] == [None, 0, 9, None]
    board.add(step(0, 101))
    assert board.lag(1) == 2


def test_workers_that_go_in_step_do_not_lag_because_they_tell_it_at_different_times():
    board = Board()
    for at in range(10):  # a hundred steps a second, and an event of each worker a second
        for worker, offset in enumerate((0.0, 0.3, 0.8)):
            number = round(100 * (at + offset)) - (7 if worker == 1 else 0)
            board.add(step(worker, number, time=1000.0 + at + offset))
    assert [board.lag(worker) for worker in range(3)] == [0, 7, 0]
    for at in range(10, 15):  # the last one says nothing more
        for worker in range(2):
            board.add(step(worker, 100 * at, time=1000.0 + at))
    assert [board.lag(worker) for worker in range(3)] == [0, 0, 1400 - 980]


def test_samples_that_nobody_reports_are_no_rate():
    board = board_of(step(0, 1, samples=None), step(1, 1))
    assert [state.samples_per_s for state in board.workers] == [None, 915]
    board.add(step(1, 2, samples=None))
    assert board.workers[1].samples_per_s == 457.5


def test_that_a_worker_left_is_said_once_whoever_is_read_first():
    at = 1.7e9
    told = {"event": "leave", "who": "shard-0", "worker": 0, "time": at + 2}  # its file is read first
    own = {"event": "leave", "who": "worker-0", "worker": 0, "time": at + 1}
    board = board_of(step(0, 5), told, step(0, 9, time=at + 0.5), own)
    assert board.take_notes() == ["worker 0 left"]
    assert [(state.step, state.is_present) for state in board.workers] == [(9, False)]
    board.add(step(0, 10, time=at + 30))  # it was away for a while
    assert board.workers[0].is_present


def test_what_a_process_has_printed_itself_is_not_said_again():
    board = board_of(
        {"event": "warn", "who": "worker-0", "text": "slow", "is_printed": True},
        {"event": "skip", "who": "worker-0", "step": 3, "tensor": "x", "is_printed": True},
        {"event": "warn", "who": "shard-0", "text": "disk"},
    )
    assert board.take_notes() == ["warning from shard-0: disk"]


def test_sums_leave_out_who_left_until_all_have():
    board = board_of(step(0, 400), step(1, 399), {"event": "leave", "who": "worker-0"})
    assert board.line().startswith("step 399/400  loss 0.412  915 samples/s")
    board.add({"event": "leave", "who": "worker-1"})
    assert board.line().startswith("step 400/400  loss 0.412  1830 samples/s")


def test_a_worker_that_joins_again_starts_afresh():
    board = board_of(step(0, 50), {"event": "join", "worker": 0}, step(0, 41, loss=None))
    (state,) = board.workers
    assert (state.step, state.loss, state.samples_per_s) == (41, None, 915)


def test_a_script_that_only_called_init_has_not_joined():
    board = board_of({"event": "init", "who": "worker-1", "worker": 1}, {"event": "init"}, step(2, 5))
    assert (board.begun, [state.worker for state in board.workers]) == ({1}, [2])
    assert board.take_notes() == []


def test_notes():
    board = board_of(
        {"event": "join", "worker": 1},
        {"event": "codec", "who": "worker-0", "spec": "int8", "why": "the link is fast"},
        {"event": "codec", "who": "worker-0", "spec": "dct"},
        {"event": "skip", "worker": 1, "step": 12, "tensor": "conv1.weight"},
        {"event": "checkpoint", "who": "shard-0", "step": 100, "folder": "run/100", "seconds": 0.42},
        {"event": "checkpoint", "who": "shard-0", "step": 200, "folder": "run/200"},
        {"event": "warn", "who": "shard-1", "text": "slow\n\x1b[31mdisk"},
        {"event": "leave", "who": "worker-1"},
        {"event": "unknown"},
        {"event": "join"},
        {},
    )
    assert board.take_notes() == [
        "worker 1 joined",
        "worker 0 uses codec int8 (the link is fast)",
        "worker 0 uses codec dct",
        "worker 1 skipped step 12: NaN or infinity in conv1.weight",
        "checkpoint of step 100 in run/100 (0.42 s)",
        "checkpoint of step 200 in run/200",
        "warning from shard-1: slow  [31mdisk",
        "worker 1 left",
    ]
    assert board.take_notes() == []
    assert [state.codec for state in board.workers] == ["dct", None]


@pytest.mark.parametrize("value", [None, "x", [], {}, -1, 10**400, float("nan"), float("inf"), True])
def test_fields_of_any_kind_do_no_harm(value):
    board = board_of(step(0, 5))
    for name in step(0, 6):
        board.add(step(0, 6) | {name: value})
    board.add(dict.fromkeys(step(0, 6), value) | {"event": "step", "worker": 0})
    assert board.line().startswith("step ")
    assert render(board)


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def plain(board, **options):
    file, clock = io.StringIO(), Clock()
    display = Display(board, console=Console(file=file, width=80), clock=clock, **options)
    return display, file, clock


def render(board):
    console = Console(width=80, file=io.StringIO(), record=True, color_system=None)
    console.print(board.table())
    return console.export_text()


def test_plain_lines_come_at_most_every_few_seconds_and_at_the_end():
    board = Board()
    display, file, clock = plain(board)
    written = []

    def refresh_at(now, *events):
        clock.now = now
        for event in events:
            board.add(event)
        display.refresh()
        lines = file.getvalue().splitlines()[len(written) :]
        written.extend(lines)
        return [line.partition("  ")[0] for line in lines]

    assert refresh_at(0.0) == []
    assert refresh_at(1.0, step(0, 1)) == ["step 1/400"]
    assert refresh_at(5.9, step(0, 2)) == []
    assert refresh_at(5.9, {"event": "join", "worker": 1}) == ["worker 1 joined"]
    assert refresh_at(6.0) == ["step 2/400"]
    assert refresh_at(60.0) == []  # nothing new
    assert refresh_at(61.0, step(0, 3)) == ["step 3/400"]
    assert refresh_at(61.5, step(0, 4)) == []
    display.close()
    assert file.getvalue().splitlines()[len(written) :] == [board.line()]
    assert board.line().startswith("step 4/400")


def test_the_last_line_is_not_repeated():
    display, file, _ = plain(board_of(step(0, 9)))
    with display:
        display.refresh()
    assert file.getvalue().count("step 9/400") == 1


def test_throttle_is_a_setting():
    board = board_of(step(0, 1))
    display, file, clock = plain(board, every_s=0.5)
    display.refresh()
    board.add(step(0, 2))
    clock.now = 0.5
    display.refresh()
    assert file.getvalue().count("\n") == 2


def test_plain_lines_go_to_stderr_and_printed_ones_to_their_stream(capsys):
    with Display(board_of(step(0, 9))) as display:
        display.refresh()
        display.print("of the script [bold]\n")
        display.print("its complaint", to_stderr=True)
    captured = capsys.readouterr()
    assert captured.out == "of the script [bold]\n"
    assert captured.err.splitlines()[0].startswith("step 9/400")
    assert captured.err.splitlines()[1] == "its complaint"


def test_a_forced_colour_does_not_make_a_pipe_a_terminal(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    with Display(board_of(step(0, 9))) as display:
        display.refresh()
    assert "\x1b" not in capsys.readouterr().err


def test_table_fits_eighty_columns():
    text = render(
        board_of(
            step(0, 12_000, total=40_000),
            step(1, 11_997, total=40_000, codec="int8[red]"),
            step(2, 9_000),
            {"event": "leave", "worker": 2},
        )
    )
    lines = [line.split() for line in text.splitlines() if line.strip()]
    assert lines[1] == ["worker", "step", "loss", "samples/s", "Mbit/s", "Mbit/s", "smaller", "lag"]
    assert lines[3:] == [
        ["all", "12000/40000", "0.412", "1830", "1.2", "0.9", "42x"],
        ["0", "12000/40000", "0.412", "915", "0.6", "0.45", "42x", "0"],
        ["1", "11997/40000", "0.412", "915", "0.6", "0.45", "42x", "3"],
        ["2", "9000/400", "0.412", "915", "0.6", "0.45", "42x", "left"],
        ["codec", "dct:block=16,step=1.5", "(worker", "0)"],
        ["codec", "int8[red]", "(worker", "1)"],
    ]
    assert max(map(len, text.splitlines())) <= 80


class Terminal(io.StringIO):
    def isatty(self):
        return True


def screen(written):
    """What a terminal shows in the end: it knows line feeds, returns, cursor up and erase line."""
    lines, row, column = [""], 0, 0
    for code, sign in re.findall(r"\x1b\[([0-9;?]*[A-Za-z])|([^\x1b])", written):
        if sign == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif sign == "\r":
            column = 0
        elif sign:
            lines[row] = lines[row].ljust(column)[:column] + sign + lines[row][column + 1 :]
            column += 1
        elif code.endswith("A"):
            row -= int(code[:-1])
        elif code == "2K":
            lines[row] = ""
        else:
            assert code[-1] in "mhl", code  # colours, and the cursor hidden and shown
    return [line.rstrip() for line in lines if line.strip()]


@pytest.mark.parametrize("no_color", [False, True])
def test_live_table_on_a_terminal(no_color, monkeypatch):
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(sys, "stdout", Terminal())
    board = board_of(step(0, 120), step(1, 117))
    file, clock = Terminal(), Clock()
    console = Console(file=file, width=80, force_terminal=True, record=True)
    display = Display(board, console=console, clock=clock)
    display.refresh()
    first = file.getvalue()
    long = "word " * 30 + "end"
    display.print("\x1b[31mepoch 1\x1b[0m [of 3]\n")
    display.print(long)
    board.add({"event": "warn", "who": "shard-0", "text": "disk [almost] full"})
    board.add(step(0, 121, loss=0.25))
    display.refresh()  # too early for the table, not for the warning
    assert "121/400" not in file.getvalue()
    display.close()
    text = console.export_text()
    for value in ("120/400", "117/400", "0.412", "1830", "0.45", "42x", "dct:block=16,step=1.5", "121/400"):
        assert value in text
    assert "120/400" in first
    lines = screen(file.getvalue())
    assert lines[:3] == ["epoch 1 [of 3]", long, "warning from shard-0: disk [almost] full"]
    assert [line.split()[:3] for line in lines[6:9]] == [
        ["all", "121/400", "0.331"],
        ["0", "121/400", "0.25"],
        ["1", "117/400", "0.412"],
    ]
    assert lines[9:] == ["codec dct:block=16,step=1.5"]
    assert ("\x1b[31mepoch 1" in file.getvalue()) == (not no_color)
    assert isinstance(sys.stdout, Terminal)  # given back
    assert sys.stdout.getvalue() == ""


def test_a_redirected_stdout_gets_the_scripts_lines(monkeypatch):
    stdout = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stdout)
    file = Terminal()
    console = Console(file=file, width=80, force_terminal=True)
    with Display(board_of(step(0, 1)), console=console, is_live=True) as display:
        display.refresh()
        display.print("result 1")
    assert stdout.getvalue() == "result 1\n"
    assert "result 1" not in file.getvalue()
