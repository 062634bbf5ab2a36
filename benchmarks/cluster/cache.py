"""`python -m benchmarks.cluster.cache`: where jobs on one Ray node share decoded samples best.

Three places, the same samples, the same batches:

- `memory`: what `shoestring.cached` does on Ray as anywhere: a database in the node's shared memory.
- `objects`: Ray's object store, an object a sample, whose references the job holds.
- `actor`: one actor a node that keeps the samples and answers for a batch.

Each is filled by one process and read by two others, jobs on the same node, at the same time. Every
sample that comes back is compared with what went in before a rate counts. The cluster is on loopback
alone, and there while this runs.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

import shoestring
from benchmarks.command import Command, say
from shoestring.cli.bench.options import AsJson, Output, check_output, deliver, describe_machine
from shoestring.launch.ray.cluster import LOCAL, load_ray, open_cluster

SIDE = 224
BATCH = 32
JOBS = 2


class Pictures:
    """Samples that are told apart, and cost nothing to make: what is timed is the way they take."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((3, SIDE, SIDE), index % 251, dtype=torch.uint8)


class Missing(Pictures):
    """The same for a job that must find everything in the cache."""

    def __getitem__(self, index: int) -> torch.Tensor:
        raise LookupError(f"sample {index} is not in the cache")


def batches_of(count: int, seed: int) -> list[list[int]]:
    order = np.random.default_rng(seed).permutation(count).tolist()
    return [order[start : start + BATCH] for start in range(0, count, BATCH)]


def read(take: Any, count: int, seed: int, seconds: float) -> float:
    """Take batches for so long; return samples a second."""
    taken, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        for batch in batches_of(count, seed):
            found = take(batch)
            if [int(sample[0, 0, 0]) for sample in found] != [index % 251 for index in batch]:
                raise SystemExit("a sample came back changed: nothing counts")
            taken += len(batch)
        seed += 1
    return taken / (time.perf_counter() - began)


class Job:
    """A process that reads samples."""

    def from_memory(self, folder: str, count: int, seed: int, seconds: float) -> float:
        data = shoestring.cached(Missing(count), name="pictures", version=1, folder=Path(folder))
        return read(data.__getitems__, count, seed, seconds)

    def from_objects(self, kept: list[Any], count: int, seed: int, seconds: float) -> float:
        ray = load_ray()
        return read(lambda batch: ray.get([kept[index] for index in batch]), count, seed, seconds)

    def from_actor(self, keeper: Any, count: int, seed: int, seconds: float) -> float:
        ray = load_ray()
        return read(lambda batch: ray.get(keeper.give.remote(batch)), count, seed, seconds)


class Keeper:
    """The actor of a node."""

    def __init__(self, count: int) -> None:
        self.samples = [Pictures(count)[index] for index in range(count)]

    def give(self, batch: list[int]) -> list[torch.Tensor]:
        return [self.samples[index] for index in batch]

    def put(self) -> list[Any]:
        ray = load_ray()
        return [ray.put(sample) for sample in self.samples]


def cache(
    count: Annotated[int, typer.Option("--samples", min=BATCH, help="How many samples there are.")] = 512,
    seconds: Annotated[float, typer.Option(min=0.1, help="How long each place is read at a time.")] = 3.0,
    repeats: Annotated[int, typer.Option(min=1, help="How often each place is read.")] = 3,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Read decoded samples on one Ray node from shared memory, Ray's object store and an actor."""
    check_output(output)
    load_before = os.getloadavg()[0]
    cluster = open_cluster(LOCAL)
    ray = cluster.ray
    process = ray.remote(num_cpus=0)
    rates: dict[str, list[float]] = {"memory": [], "objects": [], "actor": []}
    try:
        with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="shoestring-ray-cache-") as folder:
            data = shoestring.cached(Pictures(count), name="pictures", version=1, folder=Path(folder))
            for batch in batches_of(count, 0):
                data.__getitems__(batch)
            keeper = process(Keeper).remote(count)
            kept = ray.get(keeper.put.remote())
            jobs = [process(Job).remote() for _ in range(JOBS)]
            for repeat in range(repeats):
                ways: dict[str, Callable[[Any, int], Any]] = {
                    "memory": lambda job, seed: job.from_memory.remote(folder, count, seed, seconds),
                    "objects": lambda job, seed: job.from_objects.remote(kept, count, seed, seconds),
                    "actor": lambda job, seed: job.from_actor.remote(keeper, count, seed, seconds),
                }
                for name, start in ways.items():
                    found = ray.get([start(job, 100 * repeat + n) for n, job in enumerate(jobs)])
                    rates[name].append(sum(found))
                    say(f"{name}: {sum(found):,.0f} samples a second")
    finally:
        cluster.close()
    bytes_each = 3 * SIDE * SIDE
    report = {
        "machine": describe_machine(load_before),
        "ray": ray.__version__,
        "jobs": JOBS,
        "batch": BATCH,
        "sample_bytes": bytes_each,
        "rows": [
            {
                "where": name,
                "samples_s": statistics.median(own),
                "mb_s": statistics.median(own) * bytes_each / 1e6,
                "of_memory": statistics.median(own) / statistics.median(rates["memory"]),
            }
            for name, own in rates.items()
        ],
    }
    deliver(report, output, as_json)
    if not as_json:
        for row in report["rows"]:
            typer.echo(
                f"{row['where']:8} {row['samples_s']:12,.0f} samples/s  {row['of_memory']:.2f} of memory's"
            )


main = Command(
    cache, "benchmarks.cluster.cache", examples=("--seconds 1 --repeats 1", "--json --output cache.json")
)

if __name__ == "__main__":
    main()
