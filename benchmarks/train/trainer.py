"""One host's part of a race: `python -m benchmarks.train.trainer TASK.json HOST`.

The parameters are copied aside now and then and scored after the training, so that scoring
takes nothing of its time. What crosses the network card is read from the kernel's counters
after every step: headers, retries and all.
"""

import hashlib
import importlib
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from benchmarks.train.entrant import Enter, Place
from benchmarks.train.workloads import Material, find_workload

_REHEARSED = 16  # steps alone, to know what computing takes
_PASSED_OVER = 4


class Task(msgspec.Struct, frozen=True):
    """What all hosts of a race are told."""

    module: str
    options: dict[str, Any]
    workload: str
    seed: int
    rate: float
    steps: int  # to take
    schedule: int  # the steps of the whole training
    hosts: int
    addresses: list[str]
    card: str
    port: int
    folder: str
    data: str | None = None


class Result(msgspec.Struct, frozen=True):
    """How it went on one host."""

    losses: list[float | None]  # none: not a number, which JSON cannot say
    ends_s: list[float]  # of every step, since the first began
    sent_bytes: list[int]  # through the card by then
    compute_s: float  # of a step without the others
    scores: list[tuple[int, float]]  # after so many steps; of the first host
    digest: str  # of the parameters
    energy: float | None  # the sum of their squares
    facts: dict[str, Any]


def train(task: Task, host: int) -> Result:
    """Take part in the race."""
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(max(1, cores // task.hosts))
    workload = replace(find_workload(task.workload), steps=task.schedule)
    material = workload.material(task.seed, Path(task.data) if task.data else None)
    batches = torch.from_numpy(workload.batches(task.seed, material.count))
    own = batches.view(workload.steps, task.hosts, -1)[:, host]
    model = material.build()
    optimizer = material.optimizer(model)
    place = Place(host, task.hosts, tuple(task.addresses), task.card, task.port, Path(task.folder))
    enter: Enter = importlib.import_module(task.module).enter
    entrant = enter(place, model, optimizer, task.options)
    agreed: Callable[[], AbstractContextManager[None]] = getattr(entrant, "agreed", nullcontext)
    compute_s = _rehearse(material, own)
    model.train()
    losses: list[float | None] = []
    ends_s, sent = [], []
    copies: list[tuple[int, dict[str, torch.Tensor]]] = []
    before = _sent_bytes(task.card)
    began = time.perf_counter()
    for step in range(task.steps):
        for group in optimizer.param_groups:
            group["lr"] = workload.rate(step, task.rate)
        loss = material.loss(entrant.model, own[step])
        torch.autograd.backward(loss)
        entrant.step()
        entrant.zero_grad()
        losses.append(loss.item())
        ends_s.append(time.perf_counter() - began)
        sent.append(_sent_bytes(task.card) - before)
        if (step + 1) % workload.score_every == 0 and host == 0:
            with agreed():
                copies.append((step + 1, {name: value.clone() for name, value in model.state_dict().items()}))
    with agreed():
        digest, energy = _digest(model)
    facts = entrant.facts()
    entrant.close()
    torch.set_num_threads(cores)  # the other hosts are done
    return Result(losses, ends_s, sent, compute_s, _score(material, copies), digest, energy, facts)


def _rehearse(material: Material, own: torch.Tensor) -> float:
    """The time of a step without the others, all hosts at it at the same time."""
    model = material.build()
    optimizer = material.optimizer(model)
    times = []
    for step in range(_REHEARSED):
        began = time.perf_counter()
        torch.autograd.backward(material.loss(model, own[step]))
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - began)
    return statistics.median(times[_PASSED_OVER:])


def _score(material: Material, copies: list[tuple[int, dict[str, torch.Tensor]]]) -> list[tuple[int, float]]:
    model = material.build().train(False)
    scores = []
    for step, state in copies:
        model.load_state_dict(state)
        scores.append((step, material.score(model)))
    return scores


def _digest(model: nn.Module) -> tuple[str, float]:
    digest, energy = hashlib.sha256(), 0.0
    for parameter in model.parameters():
        values = parameter.detach().contiguous()
        digest.update(values.numpy().data)
        energy += float(values.double().square().sum())
    return digest.hexdigest(), energy


def _sent_bytes(card: str) -> int:
    with open("/proc/self/net/dev") as table:
        for line in table:
            name, _, counters = line.partition(":")
            if name.strip() == card:
                return int(counters.split()[8])
    raise OSError(f"no network card `{card}`")


def _end_with_parent() -> None:
    """End when the benchmark does, however that ends: it holds the other end of stdin."""
    os.read(0, 1)
    os._exit(1)


def main() -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    task = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Task)
    host = int(sys.argv[2])
    result = train(task, host)
    part = Path(task.folder) / f"host-{host}.part"
    part.write_bytes(msgspec.json.encode(result))
    part.replace(part.with_suffix(".json"))


if __name__ == "__main__":
    main()
