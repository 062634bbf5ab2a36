"""Tables of races."""

from benchmarks.train.table import lines, summarise


def row(contestant: str, final: float, seconds: float | None, size: int) -> dict:
    return {
        "contestant": contestant, "workload": "conv", "link": "loopback", "hosts": 2, "final": final,
        "seconds_to_target": seconds, "step_ms": 10.0, "exposed_comm_s": 1.0, "bytes_total": size,
    }  # fmt: skip


def test_means_are_over_the_seeds():
    (mean,) = summarise([row("ddp", 80.0, 10.0, 100), row("ddp", 90.0, 20.0, 100)])
    assert (mean["final"], mean["seconds_to_target"]) == (85.0, 15.0)


def test_a_seed_that_never_came_there_counts():
    (mean,) = summarise([row("ddp", 80.0, 10.0, 100), row("ddp", 60.0, None, 100)])
    assert mean["seconds_to_target"] is None


def test_others_are_set_against_ddp():
    found = {
        "rows": [row("ddp", 80.0, 20.0, 3_000_000), row("shoestring-local", 80.0, 4.0, 30_000)],
        "left_out": [{"contestant": "hivemind", "why": "not installed"}],
    }
    text = "\n".join(lines(found))
    assert "| shoestring-local | 80.000 | 4.0 s | 5.0 x |" in text
    assert "| 100.0 x |" in text
    assert "left out: hivemind: not installed" in text
