"""Small random fleets for tests, what every plan for them promises, and the best choice by trying every one.

`benchmarks/fleet/random_fleets.py` runs the tests that draw fleets with far more examples.
"""

import itertools
import os
import random
from collections import Counter
from collections.abc import Sequence

from hypothesis import strategies as st

from shoestring.fleet.allocate.plan import Demand, Plan, Pool

EXAMPLES = int(os.environ.get("SHOESTRING_EXAMPLES", "200"))
checked: Counter[str] = Counter()  # fleets, by what was checked


class TablePairs:
    """Pairs of kinds of work from a table of shares; what is not there cannot share."""

    def __init__(self, shares: dict[tuple[str, str, str], tuple[float, float]]) -> None:
        self.shares = shares

    def together(self, a: Demand, b: Demand, kind: str) -> tuple[float, float] | None:
        key, back = (a.kind_of_work, b.kind_of_work, kind), (b.kind_of_work, a.kind_of_work, kind)
        if key in self.shares:
            one, other = self.shares[key]
        elif back in self.shares:
            other, one = self.shares[back]
        else:
            return None
        return a.speeds[kind] * one, b.speeds[kind] * other


Fleet = tuple[list[Demand], list[Pool], TablePairs]


def draw_fleet(seed: int, jobs: int, kinds: int, most_devices: int) -> Fleet:
    """Draw a fleet where everything happens: gangs, tight memory, unknown memory, deadlines, weights."""
    draw = random.Random(seed)
    names = [f"kind-{k}" for k in range(kinds)]
    pools = [
        Pool(name, draw.randint(0, most_devices), draw.choice([None, 4, 8, 16]), draw.choice([0.0, 0.5, 2.0]))
        for name in names
    ]
    works = [f"work-{w}" for w in range(draw.randint(1, max(1, jobs)))]
    alone = {
        w: {k: draw.choice([0.0, 0.5, 1.0, 2.0, 7.0]) for k in names if draw.random() < 0.9} for w in works
    }
    memory = {w: {k: draw.randint(1, 17) for k in names if draw.random() < 0.9} for w in works}
    demands = []
    for number in range(jobs):
        work = draw.choice(works)
        demands.append(
            Demand(
                f"job-{number}",
                work,
                10 ** draw.uniform(0, 6),
                alone[work],
                devices=draw.choice([1, 1, 1, 2, 3]),
                weight=draw.choice([1.0, 1.0, 5.0]),
                deadline_s=draw.choice([None, None, -5.0, 100.0, 1e4]),
                memory_bytes=draw.choice([None, memory[work], memory[work]]),
                running_on=draw.choice([None, *names, "gone"]),
                waited_s=draw.uniform(0, 1e5),
                served=draw.uniform(0, 2),
            )
        )
    shares = {
        (a, b, k): (draw.uniform(0.1, 1.0), draw.uniform(0.1, 1.0))
        for a, b in itertools.combinations_with_replacement(works, 2)
        for k in names
        if draw.random() < 0.7
    }
    return demands, pools, TablePairs(shares)


def fleets(most_jobs: int, most_kinds: int = 3, most_devices: int = 5) -> st.SearchStrategy[Fleet]:
    return st.builds(
        draw_fleet,
        st.integers(0, 2**63),
        st.integers(0, most_jobs),
        st.integers(0, most_kinds),
        st.just(most_devices),
    )


def best_by_trying(
    columns: Sequence[tuple[float, int, int, tuple[int, ...]]], counts: Sequence[int]
) -> float:
    """Return the most that columns (worth, kind, devices, jobs) can add up to."""
    best, stack = 0.0, [(0, 0.0, tuple(counts), frozenset[int]())]
    while stack:
        at, worth, left, taken = stack.pop()
        best = max(best, worth)
        for next_ in range(at, len(columns)):
            gain, kind, devices, jobs = columns[next_]
            if devices <= left[kind] and taken.isdisjoint(jobs):
                rest = (*left[:kind], left[kind] - devices, *left[kind + 1 :])
                stack.append((next_ + 1, worth + gain, rest, taken | set(jobs)))
    return best


def check_promises(plan: Plan, demands, pools, margin):
    by_name = {demand.job: demand for demand in demands}
    pool_of = {pool.kind: pool for pool in pools}
    placed = [job for place in plan.placements for job in place.jobs]
    assert sorted(placed + list(plan.waiting)) == sorted(by_name)  # every job once
    assert list(plan.reasons) == [demand.job for demand in demands]
    assert all(f"`{job}`" in why for job, why in plan.reasons.items())
    assert {job: plan.reasons[job] for job in plan.waiting} == dict(plan.waiting)
    assert all("waits: " in why for why in plan.waiting.values())
    for kind, count in plan.devices_in_use().items():
        assert count <= pool_of[kind].count
    for place in plan.placements:
        own, memory = [by_name[job] for job in place.jobs], pool_of[place.kind].memory_bytes
        assert len(own) in (1, 2)
        assert {demand.devices for demand in own} == {place.devices}
        assert all(
            0 < speed <= d.speeds[place.kind] * (1 + 1e-12)
            for speed, d in zip(place.speeds, own, strict=True)
        )
        needs = [(demand.memory_bytes or {}).get(place.kind) for demand in own]
        if memory is None:
            continue
        if place.is_packed:
            assert None not in needs
            assert sum(needs) <= (1 - margin) * memory
        else:
            assert needs[0] is None or needs[0] <= memory
