"""What the allocator is told about jobs: sizes, speeds, memory, and who cannot be planned."""

import json

import pytest

from shoestring.fleet.engine.devices import Device, Rates
from shoestring.fleet.jobs import Job
from shoestring.fleet.measure.profile import Profile, Sample
from shoestring.fleet.run.database import Database, Entry
from shoestring.fleet.run.estimate import choose_batch, estimate, load_profiles, pools_of
from tests.unit.fleet.scripted import GIB, cpu

FAST, SLOW = cpu("fast"), cpu("slow", 1)


def profile(kind, *rows):
    samples = [Sample(batch, step_s, 0.0, peak, 3.0, 0.9, steps=10) for batch, step_s, peak in rows]
    return Profile("key", kind, tuple(samples), memory_bytes=8 * GIB)


def entry(name="a", state="queued", batch=None, done=0, device="", **job):
    job = {"batches": (8, 16), "steps": 100, **job}
    return Entry(Job(name, "train.py", **job), "key", 1000.0, state, batch, done, device, "", None, False)


BOTH = {
    "fast": profile("fast", (8, 0.1, GIB), (16, 0.15, 2 * GIB)),
    "slow": profile("slow", (8, 0.4, GIB), (16, 0.5, 2 * GIB)),
}


def estimates(*entries, profiles=BOTH, devices=(FAST, SLOW), **given):
    return estimate(entries, devices, lambda _: profiles, now=1060.0, **given)


def test_a_demand_has_what_is_left_of_the_job():
    (demand,) = estimates(entry(done=40, state="running", device="slow", deadline_s=100.0)).demands
    assert demand.remaining_steps == 60
    assert demand.speeds == pytest.approx({"fast": 10.0, "slow": 2.5})
    assert demand.memory_bytes == {"fast": GIB, "slow": GIB}
    assert demand.running_on == "slow"
    assert (demand.waited_s, demand.deadline_s) == (60.0, 40.0)


def test_speeds_seen_while_running_take_the_place_of_the_profile():
    seen = {("a", "fast"): 7.0, ("a", "slow"): 3.0, ("b", "fast"): 99.0}
    (demand,) = estimates(entry(), steps_s=seen).demands
    assert demand.speeds == pytest.approx({"fast": 7.0, "slow": 3.0})


def test_a_job_slower_than_its_profile_is_not_thought_faster_elsewhere():
    (demand,) = estimates(entry(), steps_s={("a", "fast"): 2.0}).demands  # a fifth of what was measured
    assert demand.speeds == pytest.approx({"fast": 2.0, "slow": 0.5})


def test_done_failed_and_unwanted_jobs_are_left_out():
    assert estimates(entry(state="done"), entry("b", "failed")).demands == []


def test_a_job_of_steps_takes_its_first_size_and_one_of_epochs_the_soonest():
    memory = {"fast": 8 * GIB, "slow": 8 * GIB}
    assert choose_batch(entry(batches=(8, 16)), BOTH, memory) == 8
    assert choose_batch(entry(batches=(16, 8)), BOTH, memory) == 16
    by_epochs = entry(batches=(8, 16), steps=0, epochs=1.0, samples=160)
    assert choose_batch(by_epochs, BOTH, memory) == 16  # 10 steps of 0.15 s, not 20 of 0.1 s
    (demand,) = estimates(by_epochs).demands
    assert demand.remaining_steps == 10


def test_a_size_that_does_not_fit_is_not_chosen():
    memory = {"fast": 2 * GIB, "slow": 2 * GIB}  # 2 GiB and the margin are more
    assert choose_batch(entry(batches=(16, 8)), BOTH, memory) == 8
    assert choose_batch(entry(batches=(16,)), BOTH, memory) is None


def test_a_job_keeps_the_size_it_began_with():
    found = estimates(entry(batch=16, done=10))
    assert found.batches == {"a": 16}
    assert found.demands[0].speeds["fast"] == pytest.approx(1 / 0.15)


def test_only_kinds_that_a_job_allows_and_fits_are_offered():
    (demand,) = estimates(entry(kinds=("slow",))).demands
    assert set(demand.speeds) == {"slow"}
    small = cpu("slow", 1, memory_bytes=GIB)
    (demand,) = estimates(entry(), devices=(FAST, small)).demands
    assert set(demand.speeds) == {"fast"}


@pytest.mark.parametrize(
    ("one", "profiles", "why"),
    [
        (entry(), {}, "waits to be profiled"),
        (entry(kinds=("h200",)), BOTH, "may use h200 only, and this fleet has none"),
        (entry(batches=(4096,)), BOTH, "no batch size it allows fits"),
    ],
)
def test_a_job_that_cannot_be_planned_has_a_reason(one, profiles, why):
    found = estimates(one, profiles=profiles)
    assert found.demands == []
    assert why in found.unplanned["a"]


def test_the_restart_cost_is_the_longest_start():
    assert estimates(entry()).restart_cost_s == 3.0


def test_pools_count_devices_and_take_the_smallest_memory():
    twins = [cpu("a", 0, 8 * GIB, "twin"), cpu("b", 1, 4 * GIB, "twin")]
    (pool,) = pools_of(twins)
    assert (pool.kind, pool.count, pool.memory_bytes) == ("twin", 2, 4 * GIB)


def test_a_kind_without_a_measurement_is_predicted_from_rates(tmp_path):
    def rated(name, core, flop_s):
        return Device(name, name, GIB, GIB, cores=(core,), rates=Rates(1e9, flop_s))

    devices = [rated("fast", 0, 4e9), rated("slow", 1, 1e9)]
    with Database(tmp_path) as database:
        assert load_profiles(database, "key", devices) == {}
        database.save_profile("key", "fast", BOTH["fast"].to_json())
        found = load_profiles(database, "key", devices)
        assert found["fast"] == BOTH["fast"]
        assert found["slow"].predicted_from == "fast"
        assert found["slow"].step_s(8)[0] == pytest.approx(0.2)
        database.save_profile("key", "slow", BOTH["slow"].to_json())
        assert load_profiles(database, "key", devices)["slow"] == BOTH["slow"]
        assert set(load_profiles(database, "key", [FAST])) == {"fast"}


def test_a_cpu_profile_of_the_first_version_is_not_used(tmp_path):
    """It was taken while the other devices were idle; a GPU's is as good as ever."""
    gpu = Device("gpu", "gpu", GIB, GIB, uuid="GPU-1")
    with Database(tmp_path) as database:
        for kind in ("fast", "gpu"):
            facts = json.loads(profile(kind, (8, 0.1, GIB)).to_json())
            assert facts.pop("version") == 2
            database.save_profile("key", kind, json.dumps(facts))
        assert set(load_profiles(database, "key", [FAST, gpu])) == {"gpu"}
        database.save_profile("key", "fast", BOTH["fast"].to_json())
        assert set(load_profiles(database, "key", [FAST, gpu])) == {"fast", "gpu"}
