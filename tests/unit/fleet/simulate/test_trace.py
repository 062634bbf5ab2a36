"""Gavel's traces: read line by line, and drawn the same way for the same seed."""

import pytest

from shoestring.errors import FleetError
from shoestring.fleet.simulate import trace
from shoestring.fleet.simulate.throughputs import parse_throughputs
from shoestring.fleet.simulate.trace import TraceJob, read_trace
from tests.unit.fleet.simulate.drawing import draw_trace

LINE = "A (batch size 8)\ta.py\tfolder\t--steps\t1\t{steps}\t{devices}\t{weight}\t{deadline}\t{arrival}"


def line(steps="100", devices="1", weight="1", deadline="-1.000000", arrival="0.000"):
    return LINE.format(steps=steps, devices=devices, weight=weight, deadline=deadline, arrival=arrival)


def write(tmp_path, *lines):
    path = tmp_path / "some.trace"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_lines_become_jobs(tmp_path):
    path = write(tmp_path, line(), line("250.0", "4", "5.0", "3600", "12.5"), "")
    assert read_trace(path) == [
        TraceJob(0, "A (batch size 8)", 100, 1, 1.0, None, 0.0),
        TraceJob(1, "A (batch size 8)", 250, 4, 5.0, 3600.0, 12.5),
    ]


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        (["a\tb"], "line 1: found `2 fields`"),
        ([line(), line(steps="many")], "line 2: found .* numbers"),
        ([line(steps="0")], "above 0"),
        ([line(steps="nan")], "finite"),
        ([line(arrival="inf")], "finite"),
        ([line(devices="0")], "above 0"),
        ([line(devices="5000")], "above 0"),
        ([line(weight="-1")], "above 0"),
        ([line(arrival="-1")], "above 0"),
        ([line(arrival="5"), line(arrival="4")], "line 2: found `4.0`, expected an arrival after"),
        ([""], "has no jobs"),
    ],
)
def test_wrong_lines_are_named(tmp_path, lines, found):
    with pytest.raises(FleetError, match=found) as caught:
        read_trace(write(tmp_path, *lines))
    assert "Gavel's format" in caught.value.hint


def test_files_that_cannot_be_read(tmp_path, monkeypatch):
    with pytest.raises(FleetError, match="cannot be read"):
        read_trace(tmp_path / "nothing.trace")
    path = tmp_path / "some.trace"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(FleetError, match="is no text"):
        read_trace(path)
    monkeypatch.setattr(trace, "MAX_BYTES", 1)
    with pytest.raises(FleetError, match="more than 1 bytes"):
        read_trace(path)


def test_drawn_jobs_are_as_the_generator_says():
    table = parse_throughputs(
        {"v100": {"('A', 1)": {"null": 2.0}, "('B', 1)": {"null": 5.0}, "('B', 4)": {"null": 11.0}}}
    )
    jobs = draw_trace(table, 400, seed=3, gap_s=100.0, sizes=((1, 0.7), (4, 0.3)))
    assert jobs == draw_trace(table, 400, seed=3, gap_s=100.0, sizes=((1, 0.7), (4, 0.3)))
    assert jobs != draw_trace(table, 400, seed=4, gap_s=100.0, sizes=((1, 0.7), (4, 0.3)))
    assert [job.number for job in jobs] == list(range(400))
    assert {(job.kind_of_work, job.devices) for job in jobs} == {("A", 1), ("B", 1), ("B", 4)}
    speeds = {("A", 1): 2.0, ("B", 1): 5.0, ("B", 4): 11.0}
    minutes = [job.steps / speeds[job.kind_of_work, job.devices] / 60 for job in jobs]
    assert min(minutes) >= 10**1.5 - 1
    assert max(minutes) <= 10**4
    long = sum(m > 1000 for m in minutes)
    assert 40 <= long <= 120  # a fifth of 400 is 80, and this is five times its deviation
    arrivals = [job.arrival_s for job in jobs]
    assert arrivals == sorted(arrivals)
    assert 75 <= arrivals[-1] / 399 <= 125  # mean 100, deviation 5
    assert {job.arrival_s for job in draw_trace(table, 5, seed=1)} == {0.0}
