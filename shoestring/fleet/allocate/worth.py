"""The worth of running a job on a kind of device until the next decision, by objective.

`worth[j, k]` is for job j alone on kind k; sharing scales it with the share of
its speed that the job keeps. The plan takes what adds up to the most, so only
proportions matter, and they mean something within one decision only.

- `jct`, average completion time: short jobs first, each on the kind where it is
  fast: how well the kind suits it (speed there over its best speed), times its
  devices, times the device time it still needs to the power -0.4. The power -1
  (pure shortest first) gives fast devices to short jobs that gain little from
  them; in simulations averages were lowest from -0.3 to -0.5, by 3 % or so.
- `makespan`: work at the prices of the relaxed schedule that ends soonest
  (`fluid`), and among what is equally good for the end, short jobs first; but
  long ones count too, as a long job that starts late becomes the end.
- `fair`: the least served first, so that what jobs get of the average device's
  speed evens out.
- `cost`: work at its cheapest price less the rent, so a job waits rather than
  run where it costs over a tenth more; then as `jct`.

Weights multiply. A job that can just meet its deadline goes before all others.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shoestring.fleet.allocate.fluid import shortest_end
from shoestring.fleet.allocate.pairing import Floats, Groups, Ints, Shares
from shoestring.fleet.allocate.plan import Demand, Objective, Pool

_POWER = 0.4
_TIE_BREAK = 0.02
_LONG_PART = 0.5
_SLACK = 0.1
_SLACK_UP_TO = 300  # jobs; beyond, one job's time hardly matters, and solving twice does
_DEARER = 1.1
_UNFAIR = 2.0
_URGENT = 1e3
_SLACK_ROUNDS = 2


@dataclass(frozen=True)
class Case:
    """A decision's numbers: `speeds[j, k]` is 0 where job j cannot run on kind k."""

    demands: Sequence[Demand]
    pools: Sequence[Pool]
    speeds: Floats
    steps: Floats
    devices: Ints
    counts: Ints
    weights: Floats
    groups: Groups
    shares: Shares
    round_s: float

    @property
    def best(self) -> Floats:
        """Each job's best speed; 1 for a job that can run nowhere, to divide by."""
        best = self.speeds.max(axis=1, initial=0.0)
        return np.where(best > 0, best, 1.0)

    @property
    def fit(self) -> Floats:
        """How well a kind suits a job: speed there over its best speed."""
        return self.speeds / self.best[:, None]

    @property
    def time_left_s(self) -> Floats:
        """The remaining time at best speed."""
        return self.steps / self.best


@dataclass(frozen=True)
class Valued:
    """Worth by job and kind, and for `makespan` the time before which no schedule ends."""

    worth: Floats
    end_s: float | None = None


def value(objective: Objective, case: Case, until: float) -> Valued:
    """Say what every job is worth on every kind.

    Where the time does not suffice to price work for `makespan`, only its order of jobs counts.
    """
    end_s = None
    if objective == "makespan":
        worth, end_s = _makespan(case, until)
    elif objective == "fair":
        served = np.array([demand.served for demand in case.demands])
        mean = case.speeds @ case.counts / max(1, case.counts.sum())
        worth = case.speeds / np.where(mean > 0, mean, 1.0)[:, None]
        worth *= ((np.maximum(served, 0.0) + 0.01) ** -_UNFAIR)[:, None]
    elif objective == "cost":
        worth = _cheap(case)
    else:
        worth = _short_first(case)
    worth = worth * case.weights[:, None]
    return Valued(np.where(_is_urgent(case), worth.max(initial=0.0) * _URGENT * case.fit, worth), end_s)


def _short_first(case: Case) -> Floats:
    # With a lower limit: jobs that end within a tenth of a round count as equally long.
    device_time = np.maximum(case.time_left_s, case.round_s / 10) * case.devices
    return case.fit * (case.devices * device_time**-_POWER)[:, None]


def _long_first(case: Case) -> Floats:
    return case.fit * (case.time_left_s**2)[:, None]


def _makespan(case: Case, until: float) -> tuple[Floats, float | None]:
    program = (case.speeds, case.steps, case.devices, case.counts, case.groups, case.shares)
    bound = fluid = shortest_end(*program, until=until)
    if bound is not None and len(case.steps) <= _SLACK_UP_TO:
        # Jobs with little time to lose are made dear early: whole rounds and gangs cost time ignored here.
        fluid = shortest_end(*program, slack=_SLACK, until=until)
    # The worth of the best possible round adds up to 1.
    worth = np.zeros_like(case.speeds) if fluid is None else case.speeds * fluid.price[:, None]
    for order, part in ((_short_first(case), 1.0), (_long_first(case), _LONG_PART)):
        whole = np.sort(order.max(axis=1, initial=0.0))[::-1][: int(case.counts.sum())].sum()
        worth = worth + _TIE_BREAK * part * order / (whole if whole > 0 else 1.0)
    return worth, None if bound is None else bound.end_s


def _cheap(case: Case) -> Floats:
    rent = np.array([pool.cost_per_hour / 3600 for pool in case.pools]) * case.devices[:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        price = np.where(case.speeds > 0, rent / case.speeds, np.inf)  # of one step
    lowest = price.min(axis=1, initial=np.inf)
    pays = price <= _DEARER * lowest[:, None] + 1e-300
    saved = np.where(
        pays, _DEARER * np.where(np.isfinite(lowest), lowest, 0.0)[:, None] * case.speeds - rent, 0
    )
    scale = saved.max(initial=0.0)
    order = _short_first(case)
    return np.where(pays, order * (1 + saved / scale if scale > 0 else 1.0), 0.0)


def _is_urgent(case: Case) -> NDArray[np.bool_]:
    """Mark the kinds on which a job still meets a deadline that it misses if it waits much longer."""
    deadline = np.array([np.inf if d.deadline_s is None else d.deadline_s for d in case.demands])
    with np.errstate(divide="ignore"):
        need = np.where(case.speeds > 0, case.steps[:, None] / case.speeds, np.inf)
    waits_too_long = case.time_left_s + _SLACK_ROUNDS * case.round_s >= deadline
    return (need <= deadline[:, None]) & waits_too_long[:, None]
