"""Run the workers of `python -m benchmarks.batchnorm`, and check what they report."""

import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks.batchnorm.training import Result, Task, result_file
from shoestring.config import Run
from shoestring.errors import ShoestringError
from shoestring.launch.local import Reach, run_local

_SHARDS = 2


def run_workers(task: Task, reach: Reach | None = None) -> list[Result]:
    """Run a training with processes of their own for all workers and two shards.

    Replicas must hold the same parameters at the end, and with shared statistics the same
    buffers too; otherwise there is no result.
    """
    with tempfile.TemporaryDirectory(prefix="shoestring-bench-") as place:
        folder = Path(place)
        told = msgspec.structs.replace(task, folder=place)
        outcome = run_local(
            ["-m", "benchmarks.batchnorm.training", msgspec.json.encode(told).decode()],
            Run(name="bench-batchnorm", workers=task.workers, folder=folder),
            shards=_SHARDS,
            threads=1,
            reach=reach,
        )
        if outcome.failure is not None:
            raise ShoestringError(
                f"{outcome.failure.who} failed with exit code {outcome.failure.code} "
                f"in `{task.case}` with {task.norm} statistics",
                hint="its last lines are above",
            )
        results = [
            msgspec.json.decode(result_file(folder, worker).read_bytes(), type=Result)
            for worker in range(task.workers)
        ]
    check(task, results)
    return results


def check(task: Task, results: Sequence[Result]) -> None:
    """Refuse results of replicas that differ where they must not."""
    kinds = [("parameters", {result.parameters for result in results})]
    if task.norm == "shared":
        kinds.append(("statistics", {result.buffers for result in results}))
    for what, found in kinds:
        if len(found) != 1:
            raise ShoestringError(
                f"the workers of `{task.case}` with {task.norm} statistics ended with different {what}",
                hint="please report this",
            )


def accuracy_of(results: Sequence[Result]) -> float:
    """The mean over the replicas that were measured."""
    return statistics.fmean(result.accuracy for result in results if result.accuracy is not None)


def step_ms_of(result: Result, h: int, skipped: int = 0) -> float:
    """The median time of a step, the round after every `h` of them included."""
    rounds = [
        sum(result.step_s[start : start + h]) / h for start in range(skipped, len(result.step_s) - h + 1, h)
    ]
    return 1e3 * statistics.median(rounds)
