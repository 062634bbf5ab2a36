"""The rows: their keys, what is measured on how many threads, and what does not depend on time."""

import gc
from dataclasses import asdict

import pytest

from shoestring.bench import codec
from shoestring.bench.machine import Memcpy

KEYS = {
    "codec", "options", "backend", "threads", "gradients", "values", "bytes", "bits_per_value", "nmse",
    "entropy_gap", "encode_gbps", "feedback_gbps", "decode_gbps", "memcpy_gbps", "encode_over_memcpy",
    "decode_over_memcpy", "correct",
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
    assert codec.time_call(lambda: calls.append(gc.isenabled()), codec.Effort(repeats=4, seconds=0)) >= 0
    assert calls == [True] + [False] * 4  # the first warms up
    assert gc.isenabled()


def test_clock_leaves_the_collector_on_after_a_failure():
    calls = []

    def fail():
        calls.append(1)
        if len(calls) == 3:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        codec.time_call(fail, codec.Effort(repeats=5, seconds=0))
    assert gc.isenabled()


def test_memcpy_reports_the_median_of_its_copies():
    memcpy = Memcpy(1)
    rates = sorted([*memcpy.sample(2), *memcpy.sample()])
    assert memcpy.gbps == rates[1]
    assert Memcpy(1).gbps > 0
