"""The sentence of every job, for placements that are given."""

from shoestring.fleet.allocate.plan import Demand, Placement, Pool
from shoestring.fleet.allocate.reasons import explain, usable

GIB = 2**30
POOLS = [Pool("slow", 2, 4 * GIB), Pool("fast", 1, 8 * GIB)]
OTHERS = "jobs that finish sooner or gain more there"


def job(name, steps=100, fast=4.0, slow=1.0, need=1, devices=1, running_on=None):
    speeds = {"fast": fast, "slow": slow}
    memory = {"fast": need * GIB, "slow": need * GIB}
    return Demand(name, "w", steps, speeds, devices=devices, memory_bytes=memory, running_on=running_on)


def one(kind, *jobs, speeds=(1.0,), devices=1):
    return Placement(kind, jobs, devices, speeds)


def sentence(demand, *placements, others=(), objective="jct"):
    return explain([demand, *others], POOLS, placements, objective)[0][demand.job]


def test_a_job_that_runs():
    assert sentence(job("a"), one("fast", "a")) == "`a` runs on fast: no kind is faster for it"
    both = [one("fast", "b", speeds=(4.0,)), one("slow", "a")]
    taken = f"`a` runs on slow: the only fast, where it is faster, is with {OTHERS}"
    assert sentence(job("a"), *both, others=[job("b")]) == taken
    stays = "`a` runs on slow: it is there already, and moving to fast would cost more than it gains"
    assert sentence(job("a", running_on="slow"), one("slow", "a")) == stays
    assert sentence(job("a"), one("slow", "a")) == "`a` runs on slow: it does more good there than on fast"
    gang = one("slow", "a", speeds=(1.0,), devices=2)
    assert sentence(job("a", devices=2), gang) == "`a` runs on 2 slow: no kind is faster for it"


def test_a_job_that_shares():
    pair = one("fast", "a", "b", speeds=(3.0, 2.5))
    assert sentence(job("b"), pair, others=[job("a")]) == (
        "`b` shares fast with `a`: 2.5 of its 4 steps/s alone"
    )


def test_jobs_that_wait_are_told_when_devices_fall_free():
    running = [one("fast", "x", speeds=(4.0,)), one("slow", "y"), one("slow", "z")]
    demands = [job("late", 900), job("x", 40), job("y", 50), job("z", 60), job("next", 30)]
    reasons, waiting = explain(demands, POOLS, running, "fair")
    assert list(reasons) == ["late", "x", "y", "z", "next"]
    about = "`{}` waits: all 1 fast and 2 slow are with jobs that had less of their share; about {} s"
    assert waiting == {"late": about.format("late", 10), "next": about.format("next", 10)}


def test_jobs_that_cannot_run_are_told_why():
    unknown = sentence(job("a", fast=0.0, slow=0.0))
    assert unknown.endswith("not known on any device here; run `shoestring fleet profile a`")
    large = "`a` waits: it needs 9.0 GiB on a device, and the largest it could use has 8.0 GiB"
    assert sentence(job("a", need=9)) == large
    gang = "`a` waits: it needs 3 devices of one kind at once, and it could use 2 at most"
    assert sentence(job("a", devices=3)) == gang
    dear = "`a` waits: the free fast cost too much for what it does there"
    assert sentence(job("a"), objective="cost") == dear


def test_usable_pools_come_fastest_first():
    assert [pool.kind for pool in usable(job("a"), POOLS)] == ["fast", "slow"]
    assert [pool.kind for pool in usable(job("a", need=5), POOLS)] == ["fast"]
    assert [pool.kind for pool in usable(job("a", devices=2), POOLS)] == ["slow"]
