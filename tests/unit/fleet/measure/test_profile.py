"""Profiles: which sizes are measured, what is predicted, and that memory is never overrun to find out."""

import pytest

from shoestring.errors import FleetError
from shoestring.fleet.engine.devices import Rates
from shoestring.fleet.jobs import Job
from shoestring.fleet.measure.profile import Profile, Profiler, Sample, sizes_to_measure
from tests.unit.fleet.scripted import GIB, MeasuredEngine, cpu


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("pass\n")
    return str(path)


def job(script, *batches):
    return Job("a", script, batches=batches, steps=100)


def profiler(tmp_path, **given):
    engine = MeasuredEngine((cpu("fast"),), **given)
    return Profiler(engine, tmp_path / "profile"), engine


def line(at_zero, slope):
    return lambda batch: at_zero + slope * batch


@pytest.mark.parametrize(
    ("allowed", "measured"),
    [
        ((64,), [16, 32, 64]),
        ((64, 8), [4, 8, 64]),
        ((1,), [1]),
        ((2,), [1, 2]),
        ((8, 16, 32, 64, 128, 256, 512), [8, 64, 512]),
    ],
)
def test_sizes_to_measure(allowed, measured):
    assert sizes_to_measure(allowed) == measured


def test_a_measured_size_is_itself_and_the_others_come_from_the_line(tmp_path, script):
    measure, _ = profiler(tmp_path, step_s=line(0.01, 0.001), peak_bytes=line(GIB, 1000))
    found = measure.profile(job(script, 16, 32, 64), cpu("fast"))
    assert found.step_s(32)[0] == pytest.approx(0.042)
    assert found.step_s(48)[0] == pytest.approx(0.058)
    assert found.peak_bytes(64) == (GIB + 64_000, 0)
    assert found.time_line.worst_residual == pytest.approx(0, abs=1e-9)
    assert found.busy == 1.0
    assert Profile.from_json(found.to_json()) == found


def test_a_size_that_would_not_fit_is_not_run(tmp_path, script):
    """1 GiB and 0.1 a sample: 64 would take 7.4 of the device's 8 GiB, 128 would take 13.8."""
    measure, engine = profiler(
        tmp_path, step_s=line(0.01, 0.001), peak_bytes=lambda b: int(GIB * (1 + 0.1 * b))
    )
    found = measure.profile(job(script, 8, 16, 32, 48, 56, 64, 128, 256), cpu("fast"))
    assert engine.batches == [8, 48, 56, 64]  # two, then the largest that surely fits; then it is surer
    assert found.does_not_fit == (256,)
    assert found.fits(64, 8 * GIB)
    assert not found.fits(128, 8 * GIB)
    assert not found.fits(256, 8 * GIB)
    assert found.fits(128, 16 * GIB)


@pytest.mark.parametrize("words", ["torch.OutOfMemoryError: CUDA out of memory.", "MemoryError"])
def test_a_run_out_of_memory_rules_its_size_out(tmp_path, script, words):
    measure, engine = profiler(
        tmp_path, step_s=line(0.01, 0.001), peak_bytes=line(GIB, 1000), fails_at=(64,), words=words
    )
    found = measure.profile(job(script, 16, 32, 64), cpu("fast"))
    assert engine.batches == [16, 32, 64]
    assert found.does_not_fit == (64,)
    assert found.fits(32, 8 * GIB)
    assert not found.fits(64, 8 * GIB)


def test_a_job_that_fits_nowhere_is_refused(tmp_path, script):
    measure, _ = profiler(
        tmp_path, step_s=line(1, 0), peak_bytes=line(1, 0), fails_at=(16, 32, 64), words="out of memory"
    )
    with pytest.raises(FleetError, match="runs out of memory on `fast` at batch size 16"):
        measure.profile(job(script, 16, 32, 64), cpu("fast"))


def test_a_script_that_fails_is_quoted(tmp_path, script):
    measure, _ = profiler(
        tmp_path, step_s=line(1, 0), peak_bytes=line(1, 0), fails_at=(16,), words="NameError: no such thing"
    )
    with pytest.raises(FleetError, match="exit code 1 before 20 steps(?s:.*)NameError: no such thing"):
        measure.profile(job(script, 16, 32, 64), cpu("fast"))


def test_another_kind_is_predicted_between_what_its_rates_say():
    sample = Sample(8, 0.1, 0.01, GIB, 2.0, 0.9, steps=10)
    measured = Profile("key", "fast", (sample,))
    guess = measured.on("slow", Rates(4e9, 4e9), Rates(1e9, 4e9))
    assert guess.predicted_from == "fast"
    assert guess.step_s(8)[0] == pytest.approx(0.2)  # between equal and four times as slow
    assert guess.step_s(8)[1] >= 0.2  # either may be true
    assert guess.peak_bytes(8) == (GIB, 0)


def test_a_damaged_profile_is_refused():
    with pytest.raises(FleetError, match="cannot be read"):
        Profile.from_json('{"key": 1}')
