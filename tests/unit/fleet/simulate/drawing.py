"""Jobs of a simulation, drawn the way Gavel's generator does."""

import random
from collections.abc import Sequence

from shoestring.fleet.simulate.throughputs import Throughputs
from shoestring.fleet.simulate.trace import TraceJob


def draw_trace(
    throughputs: Throughputs,
    jobs: int,
    seed: int,
    *,
    gap_s: float = 0.0,
    reference: str = "v100",
    sizes: Sequence[tuple[int, float]] = ((1, 1.0),),
) -> list[TraceJob]:
    """Draw jobs; the same seed gives the same.

    A fifth takes 10^3 to 10^4 minutes on `reference`, the rest 10^1.5 to 10^3,
    spread evenly over the exponent. `gap_s` is the mean time between arrivals
    of a Poisson process; 0 lets all arrive at once. `sizes` gives numbers of
    devices and how often each is drawn.
    """
    draw = random.Random(seed)
    counts, odds = zip(*sizes, strict=True)
    arrival, drawn = 0.0, []
    for number in range(jobs):
        devices = draw.choices(counts, odds)[0]
        work = draw.choice(throughputs.works(reference, devices))
        exponent = draw.uniform(3, 4) if draw.random() >= 0.8 else draw.uniform(1.5, 3)
        steps = int(60 * 10**exponent * throughputs.speeds(work, devices, [reference])[reference])
        drawn.append(TraceJob(number, work, max(1, steps), devices, 1.0, None, arrival))
        arrival += draw.expovariate(1 / gap_s) if gap_s else 0.0
    return drawn
