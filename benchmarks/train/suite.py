"""All races of `python -m benchmarks.train`, one after the other on one machine."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.train import ablation
from benchmarks.train.contestants import (
    CONTESTANTS,
    Contestant,
    find_contestant,
    find_python,
    find_version,
)
from benchmarks.train.race import Entry, race
from benchmarks.train.rates import rate_of
from benchmarks.train.standing import Row, rank, timed_steps, transfer
from benchmarks.train.trainer import Result
from benchmarks.train.workloads import WORKLOADS, Workload, find_workload
from shoestring.bench.link import hosts as network
from shoestring.errors import ShoestringError, UsageError

LINKS = ("loopback", "1gbit-1ms", "100mbit-10ms", "10mbit-40ms")
_SEARCH_SEED = 100
_LIMIT_S = 1500.0


@dataclass(frozen=True)
class Effort:
    """What to race, and how often."""

    workloads: tuple[str, ...] = tuple(WORKLOADS)
    contestants: tuple[str, ...] = tuple(CONTESTANTS)
    links: tuple[str, ...] = LINKS
    hosts: tuple[int, ...] = (2,)
    seeds: int = 2
    timed_steps: int = 32
    data: Path | None = None


FULL = Effort()
QUICK = Effort(
    workloads=("conv",),
    contestants=("ddp", "powersgd-2", "torchft-diloco", "shoestring-auto", "shoestring-local"),
    links=("loopback", "100mbit-10ms"),
    seeds=1,
    timed_steps=24,
)


def measure(
    effort: Effort, say: Callable[[str], None], keep: Callable[[dict[str, Any]], None] = lambda found: None
) -> dict[str, Any]:
    """Race; return rows, and what could not take part with the reason.

    What is there so far is given to `keep` after every row, as all of it takes long.
    """
    for link in effort.links:
        if link not in LINKS:
            raise UsageError(f"there is no link `{link}`", hint=f"one of {', '.join(LINKS)}")
    left_out = [{"link": link, "why": why} for link in effort.links if (why := network.missing(link))]
    links = [link for link in effort.links if not network.missing(link)]
    rows: list[dict[str, Any]] = []
    found = {"targets": {name: WORKLOADS[name].target for name in effort.workloads}, "rows": rows}
    found["left_out"] = left_out

    def take(row: Row) -> None:
        rows.append(asdict(row))
        _tell(row, say)
        keep(found)

    for workload in (find_workload(name) for name in effort.workloads):
        for contestant in (find_contestant(name) for name in effort.contestants):
            try:
                find_python(contestant)
                for count in effort.hosts:
                    _race_everywhere(contestant, workload, links, count, effort, take)
            except ShoestringError as error:
                say(f"{contestant.name}: {error.message}")
                left_out.append(
                    {
                        "contestant": contestant.name,
                        "workload": workload.name,
                        "why": f"{error.message}: {error.hint}",
                    }
                )
    return found


def search(effort: Effort, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Train every contestant with every learning rate of the grid, on loopback.

    With a shorter schedule than the races have, and another seed.
    """
    found = []
    with network.connected("loopback", network.HOSTS) as hosts:
        for workload in (_shortened(find_workload(name)) for name in effort.workloads):
            for contestant in (find_contestant(name) for name in effort.contestants):
                for rate in workload.rates:
                    entry = Entry(contestant, workload, _SEARCH_SEED, rate, workload.steps, effort.data)
                    row: dict[str, Any] = {
                        "contestant": contestant.name,
                        "workload": workload.name,
                        "rate": rate,
                        "steps": workload.steps,
                    }
                    try:
                        row["final"] = race(entry, hosts, network.HOSTS, _LIMIT_S)[0].scores[-1][1]
                    except ShoestringError as error:
                        row |= {"final": None, "why": f"{error.message}: {error.hint}"}
                    say(f"{contestant.name} on {workload.name} with rate {rate:g}: {row['final']}")
                    found.append(row)
    return found


def ablate(effort: Effort, say: Callable[[str], None], *, is_local: bool = False) -> list[dict[str, Any]]:
    """Leave out one part of our exchange at a time, with all workers in this process.

    `is_local`: change how local steps go, instead.
    """
    rows: list[dict[str, Any]] = []
    for workload in (find_workload(name) for name in effort.workloads):
        variants = ablation.LOCAL if is_local else ablation.VARIANTS
        rows += ablation.measure(workload, effort.seeds, variants, say, effort.data)
    return rows


def _shortened(workload: Workload) -> Workload:
    """A schedule of fewer steps, whole periods of every contestant."""
    return replace(workload, steps=workload.score_every * (workload.steps // workload.score_every * 2 // 5))


def versions(effort: Effort) -> dict[str, str]:
    """The version of every package that contestants need, of the Python that runs them."""
    found = {}
    for contestant in (find_contestant(name) for name in effort.contestants):
        try:
            found[contestant.package] = find_version(contestant)
        except UsageError:
            found[contestant.package] = "not installed"
    return found


def _race_everywhere(
    contestant: Contestant,
    workload: Workload,
    links: Sequence[str],
    count: int,
    effort: Effort,
    take: Callable[[Row], None],
) -> None:
    rate = rate_of(contestant.name, workload)
    courses: dict[int, list[Result]] = {}
    own_space = not network.missing("loopback", own_space=True)
    with network.connected("loopback", count, own_space=own_space) as hosts:
        for seed in range(effort.seeds):
            entry = Entry(contestant, workload, seed, rate, workload.steps, effort.data)
            courses[seed] = race(entry, hosts, count, _LIMIT_S)
            take(rank(entry, "loopback", courses[seed], courses[seed], cards=int(own_space)))
    for link in (link for link in links if link != "loopback"):
        with network.connected(link, count) as hosts:
            for seed in range(effort.seeds if contestant.follows_link else 1):
                entry = Entry(contestant, workload, seed, rate, workload.steps, effort.data)
                if not contestant.is_whole:
                    taken = timed_steps(entry, effort.timed_steps)
                    entry = Entry(contestant, workload, seed, rate, taken, effort.data)
                results = race(entry, hosts, count, _LIMIT_S)
                take(row := rank(entry, link, results, courses[seed], cards=count))
            if not contestant.follows_link:  # what steps take does not depend on the seed
                for seed in range(1, effort.seeds):
                    take(transfer(row, workload, seed, courses[seed]))


def _tell(row: Row, say: Callable[[str], None]) -> None:
    reached = (
        "not reached" if row.seconds_to_target is None else f"{row.seconds_to_target:.1f} s to the target"
    )
    say(
        f"{row.workload} {row.link} {row.hosts} hosts, {row.contestant}: {row.final:.3f}, {reached}, "
        f"{row.step_ms:.1f} ms a step, {(row.bytes_total or 0) / 1e6:.2f} MB"
    )
