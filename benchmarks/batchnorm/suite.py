"""What sharing BatchNorm statistics buys, and what it costs.

One small residual net is trained in three cases, with the statistics of each worker's own
batch (`local`), with shared ones (`shared`), and with those of all workers' batches as one
(`joined`, what SyncBatchNorm computes); the same images in every step, the same initial
parameters. Trainings with shared statistics are real: processes for workers and shards.
So are those with local statistics and local steps. The rest is computed in this process.

A result counts only if all replicas of a run ended with the same bits, statistics included
where they are shared. Bytes and messages are counted on a worker's sockets during the first
steps, with shared statistics and with BatchNorm as it is.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from benchmarks.batchnorm.cases import CASES, Case, load_parts
from benchmarks.batchnorm.delay import measure_delay
from benchmarks.batchnorm.net import build_net
from benchmarks.batchnorm.runs import accuracy_of, run_workers, step_ms_of
from benchmarks.batchnorm.training import COUNTED, Kind, Result, Task, train_alone
from shoestring.bench.data import Images

NORMS: tuple[Kind, ...] = ("local", "shared", "joined")
POLICIES = {"every": 1, "local": 8}  # steps a round
_DISTANCE = 0.01  # below that from local to joined, there is nothing to recover

Say = Callable[[str], None]


@dataclass(frozen=True)
class Effort:
    steps: int
    seeds: int
    policies: tuple[str, ...]
    delay_steps: int
    delay_repeats: int
    delay_batches: tuple[int, ...]
    workers: int = 8


QUICK = Effort(steps=400, seeds=1, policies=("every",), delay_steps=60, delay_repeats=3, delay_batches=(2,))
FULL = Effort(
    steps=1500, seeds=3, policies=("every", "local"), delay_steps=100, delay_repeats=7, delay_batches=(2, 32)
)


@dataclass(frozen=True)
class Row:
    """One training. What was not measured in processes has no bytes and no times."""

    case: str
    norm: str
    policy: str  # `every`, or `local-8`: eight local steps a round
    workers: int
    batch: int  # of a worker
    steps: int
    seed: int
    accuracy: float
    extra_bytes_per_step: float | None  # up and down, against BatchNorm as it is
    step_ms: float | None  # of the first worker, with all of them on this machine


@dataclass(frozen=True)
class TrafficRow:
    """What shared statistics add to a step of one worker."""

    case: str
    policy: str
    layers: int
    channels: int
    extra_up_bytes: float
    extra_down_bytes: float
    extra_up_bytes_per_channel: float
    extra_down_bytes_per_channel: float
    messages: float  # both ways, with BatchNorm as it is
    extra_messages: float
    local_step_ms: float
    shared_step_ms: float


@dataclass(frozen=True)
class SummaryRow:
    """Mean accuracies over the seeds."""

    case: str
    policy: str
    seeds: int
    local: float
    shared: float
    joined: float
    recovered: float | None  # of the distance from local to joined, where there is one


def measure(effort: Effort, cases: Sequence[Case], say: Say, data: Path | None = None) -> dict[str, Any]:
    """Return the rows of all trainings, their summary, the traffic, and times on a link with delay."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as each worker has; sums are then in one order
    try:
        return _measure(effort, cases, say, data)
    finally:
        torch.set_num_threads(threads)


def _measure(effort: Effort, cases: Sequence[Case], say: Say, data: Path | None) -> dict[str, Any]:
    train, test = load_parts(data)
    given = "" if data is None else str(data.resolve())
    delay = []
    for batch in effort.delay_batches:
        timed = Task("plain", "local", 0, effort.delay_steps, effort.workers, batch=batch, data=given)
        delay += measure_delay(timed, norm_widths(), repeats=effort.delay_repeats, say=say)
    rows: list[Row] = []
    traffic: list[TrafficRow] = []
    plain: dict[tuple[int, int], Result] = {}
    for policy in effort.policies if effort.seeds else ():
        for case in cases:
            h = POLICIES[policy]
            steps = -(-effort.steps // h) * h  # whole rounds: replicas are equal after the last
            task = Task(case.name, "local", 0, steps, effort.workers, h, data=given, is_counted=True)
            found, own = _train_all(task, effort.seeds, plain, train, test, say)
            rows += found
            traffic.append(own)
    return {
        "data": train.source,
        "rows": [asdict(row) for row in rows],
        "summary": [asdict(row) for row in summarise(rows)],
        "traffic": [asdict(row) for row in traffic],
        "delay": [asdict(row) for row in delay],
    }


def _train_all(
    task: Task, seeds: int, plain: dict[tuple[int, int], Result], train: Images, test: Images, say: Say
) -> tuple[list[Row], TrafficRow]:
    """Train one case in all ways with every seed; the first gives the traffic and the times.

    `plain` holds a worker's result with BatchNorm as it is, by batch and steps a round: what it
    sends and how long it takes do not depend on the images.
    """
    accuracies: dict[tuple[int, Kind], float] = {}
    first: dict[Kind, Result] = {}
    for seed, norm in product(range(seeds), NORMS):
        own = msgspec.structs.replace(task, norm=norm, seed=seed)
        if norm == "shared" or (norm == "local" and task.h > 1):
            results = run_workers(own)
            first.setdefault(norm, results[0])
            accuracies[seed, norm] = accuracy_of(results)
        else:
            accuracies[seed, norm] = train_alone(own, train, test)
        accuracy = 100 * accuracies[seed, norm]
        say(f"{task.case}, {policy_name(task.h)}, seed {seed}: {norm} {accuracy:.2f} % right")
    setting = (CASES[task.case].batch, task.h)
    if "local" in first:
        plain.setdefault(setting, first["local"])
    elif setting not in plain:
        say(f"batch {setting[0]}, {policy_name(task.h)}: counting messages")
        short = msgspec.structs.replace(task, steps=min(COUNTED, task.steps), is_measured=False)
        plain[setting] = run_workers(short)[0]
    traffic = compare_traffic(task, plain[setting], first["shared"])
    rows = [
        _row(msgspec.structs.replace(task, norm=norm, seed=seed), accuracy, traffic)
        for (seed, norm), accuracy in accuracies.items()
    ]
    return rows, traffic


def policy_name(h: int) -> str:
    return "every" if h == 1 else f"local-{h}"


def norm_widths() -> list[int]:
    """The channels of the net's norms."""
    return [module.num_features for module in build_net().modules() if isinstance(module, nn.BatchNorm2d)]


def compare_traffic(task: Task, plain: Result, shared: Result) -> TrafficRow:
    """What a worker's first steps sent and received more with shared statistics."""
    steps = min(COUNTED, task.steps)
    widths = norm_widths()
    channels = sum(widths)
    up = (shared.sent.size_bytes - plain.sent.size_bytes) / steps
    down = (shared.heard.size_bytes - plain.heard.size_bytes) / steps
    messages = plain.sent.messages + plain.heard.messages
    return TrafficRow(
        case=task.case,
        policy=policy_name(task.h),
        layers=len(widths),
        channels=channels,
        extra_up_bytes=up,
        extra_down_bytes=down,
        extra_up_bytes_per_channel=up / channels,
        extra_down_bytes_per_channel=down / channels,
        messages=messages / steps,
        extra_messages=(shared.sent.messages + shared.heard.messages - messages) / steps,
        local_step_ms=step_ms_of(plain, task.h),
        shared_step_ms=step_ms_of(shared, task.h),
    )


def _row(task: Task, accuracy: float, traffic: TrafficRow) -> Row:
    extra: dict[str, float | None] = {"local": 0.0, "joined": None}
    extra["shared"] = traffic.extra_up_bytes + traffic.extra_down_bytes
    times = {"local": traffic.local_step_ms, "shared": traffic.shared_step_ms, "joined": None}
    return Row(
        case=task.case,
        norm=task.norm,
        policy=policy_name(task.h),
        workers=task.workers,
        batch=CASES[task.case].batch,
        steps=task.steps,
        seed=task.seed,
        accuracy=accuracy,
        extra_bytes_per_step=extra[task.norm],
        step_ms=times[task.norm],
    )


def summarise(rows: Sequence[Row]) -> list[SummaryRow]:
    """The means over the seeds, and how much of what joined statistics win shared ones win."""
    summary = []
    for policy, case in dict.fromkeys((row.policy, row.case) for row in rows):
        own = [row for row in rows if (row.policy, row.case) == (policy, case)]
        means = {norm: statistics.fmean(row.accuracy for row in own if row.norm == norm) for norm in NORMS}
        distance = means["joined"] - means["local"]
        summary.append(
            SummaryRow(
                case=case,
                policy=policy,
                seeds=len({row.seed for row in own}),
                **means,
                recovered=(means["shared"] - means["local"]) / distance if distance >= _DISTANCE else None,
            )
        )
    return summary


def show(result: dict[str, Any]) -> list[str]:
    """The lines of tables for people."""
    lines = [f"{'case':13}{'policy':>9}{'local':>9}{'shared':>9}{'joined':>9}{'recovered':>11}"]
    for row in result["summary"]:
        means = "".join(f"{100 * row[norm]:9.2f}" for norm in NORMS)
        recovered = "" if row["recovered"] is None else f"{row['recovered']:11.1%}"
        lines.append(f"{row['case']:13}{row['policy']:>9}{means}{recovered}")
    lines.append("")
    for row in result["traffic"]:
        lines.append(
            f"{row['case']}, {row['policy']}: {row['extra_messages']:g} more messages a step, "
            f"{row['extra_up_bytes_per_channel']:.2f} more bytes a channel up, "
            f"{row['extra_down_bytes_per_channel']:.2f} down"
        )
    lines.append("")
    for row in result["delay"]:
        emulated = ", emulated" if row["is_emulated"] else ""
        lines.append(
            f"{row['delay_ms']:g} ms delay, batch {row['batch']}: "
            f"{row['norm']} {row['step_ms']:.1f} ms a step, {row['ratio']:.3f} x local{emulated}"
        )
    return lines
