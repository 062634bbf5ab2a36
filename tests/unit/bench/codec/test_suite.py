"""The rows: their keys, what is measured on how many threads, and what does not depend on time."""

import gc
from dataclasses import asdict

import numpy as np
import pytest

from shoestring.bench.codec import suite as codec
from shoestring.bench.machine import Cores, Memcpy

KEYS = {
    "codec", "options", "backend", "threads", "gradients", "values", "bytes", "bits_per_value", "nmse",
    "entropy_gap", "encode_gbps", "feedback_gbps", "decode_gbps", "memcpy_gbps", "core_scaling",
    "encode_over_memcpy", "decode_over_memcpy", "correct",
}  # fmt: skip
SOON = codec.Effort(repeats=2, seconds=0, copy_mib=1)


@pytest.mark.parametrize("spec", ["dct:block=8,bits=1.0", "dct", "int8", "topk:ratio=0.1"])
def test_row_has_every_key(bucket, spec):
    row = codec.measure(codec.build(spec), bucket, Memcpy(1), SOON)
    found = asdict(row)
    assert set(found) == KEYS
    assert row.spec == spec
    assert row.correct is True
    assert row.gradients == "small"
    assert row.values == bucket.values.size
    assert row.bits_per_value == 8 * row.bytes / row.values
    assert row.backend == ("numba" if row.codec == "dct" else "numpy")
    assert (row.entropy_gap is None) == (row.codec != "dct")
    assert 0 <= row.nmse <= 1
    assert min(row.encode_gbps, row.feedback_gbps, row.decode_gbps, row.memcpy_gbps) > 0
    assert row.encode_over_memcpy == pytest.approx(row.encode_gbps / row.memcpy_gbps, rel=1e-12)


def test_definition_can_be_measured_as_well(bucket):
    row = codec.measure(codec.build("dct:bits=1", backend="numpy"), bucket, Memcpy(1), SOON)
    assert (row.codec, row.options, row.backend) == ("dct", "bits=1.0", "numpy")


def test_main_codecs_are_measured_on_all_threads_and_numpy_on_one():
    def planned(specs, threads, everywhere):
        return [(one.spec, one.threads) for one in codec.plan(specs, threads, everywhere=everywhere)]

    specs = ["dct", "dct:bits=2", "int8"]
    assert planned(specs, [1, 2], False) == [("dct", 1), ("dct", 2), ("dct:bits=2.0", 1), ("int8", 1)]
    assert planned(specs, [2, 3], True) == [
        *(("dct", 2), ("dct", 3), ("dct:bits=2.0", 2), ("dct:bits=2.0", 3)),
        ("int8", 1),
    ]


@pytest.mark.parametrize("specs", [codec.FULL_SPECS, codec.QUICK_SPECS])
def test_default_codecs_exist_and_differ(specs):
    assert len({codec.build(spec).spec for spec in specs}) == len(specs)


def test_call_is_repeated_without_garbage_collection():
    calls = []
    effort = codec.Effort(repeats=4, seconds=0)
    assert codec.time_call(lambda: calls.append(gc.isenabled()), effort, Cores(1)) >= 0
    assert len(calls) > 4
    assert not any(calls)
    assert gc.isenabled()


def test_clock_leaves_the_collector_on_after_a_failure():
    calls = []

    def fail():
        calls.append(1)
        if len(calls) == 3:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        codec.time_call(fail, codec.Effort(repeats=5, seconds=0), Cores(1))
    assert gc.isenabled()


class Coming:
    """Cores that are there at some looks only."""

    def __init__(self, looks: list[bool]) -> None:
        self._looks = iter(looks)

    def are_there(self) -> bool:
        return next(self._looks, False)


@pytest.mark.parametrize(
    ("looks", "counted"),
    [([True, True], 1), ([True, False, False, True, True], 3), ([], None)],
    ids=["at once", "after a while", "never"],
)
def test_only_calls_between_two_good_looks_count(looks, counted, monkeypatch):
    """A call takes as many seconds as there have been; the second of a burst ends it and may count."""
    monkeypatch.setattr(codec, "_BURST_S", 1e-9)
    clock, calls = [0.0], []

    def call():
        calls.append(1)
        clock[0] += len(calls)

    monkeypatch.setattr(codec.time, "perf_counter", lambda: clock[0])
    found = codec.time_call(call, codec.Effort(repeats=1, seconds=0), Coming(looks))
    if counted is None:
        assert len(calls) == 2 * codec._PATIENCE
        assert found == np.median(range(2, len(calls) + 1, 2))
    else:
        assert found == len(calls) == 2 * counted


def test_cores_compare_threads_with_one():
    cores = Cores(2)
    assert 0 < cores.scaling() < 100
    cores.are_there()
    assert len(cores.seen) > 1
    assert Cores(1).are_there()


def test_memcpy_reports_the_median_of_its_copies():
    memcpy = Memcpy(1)
    rates = sorted([*memcpy.sample(2), *memcpy.sample()])
    assert memcpy.gbps == rates[1]
    assert Memcpy(1).gbps > 0
