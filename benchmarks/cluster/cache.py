"""Where should jobs on one Ray node share decoded samples? Three places, the same samples, the same batches.

python benchmarks/cluster/cache.py --json results.json

- `memory`: what `shoestring.cached` does on Ray as anywhere: a database in the node's shared memory.
- `objects`: Ray's object store, an object a sample, whose references the job holds.
- `actor`: one actor a node that keeps the samples and answers for a batch.

Each is filled by one process and read by two others, jobs on the same node, at the same time. Every
sample that comes back is compared with what went in before a rate counts. The cluster is on loopback
alone, and there while this runs.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import shoestring
from shoestring.cli import env
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    count, seconds = arguments.samples, arguments.seconds
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
            for repeat in range(arguments.repeats):
                ways = {
                    "memory": lambda job, seed: job.from_memory.remote(folder, count, seed, seconds),
                    "objects": lambda job, seed: job.from_objects.remote(kept, count, seed, seconds),
                    "actor": lambda job, seed: job.from_actor.remote(keeper, count, seed, seconds),
                }
                for name, start in ways.items():
                    found = ray.get([start(job, 100 * repeat + n) for n, job in enumerate(jobs)])
                    rates[name].append(sum(found))
                    print(f"{name}: {sum(found):,.0f} samples a second", flush=True)
    finally:
        cluster.close()
    bytes_each = 3 * SIDE * SIDE
    report = {
        "machine": {**env.collect(), "load_before": load_before},
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
    print(json.dumps(report["rows"], indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
