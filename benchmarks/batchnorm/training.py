"""The trainings of `python -m benchmarks.batchnorm`: by workers in processes, and in one process.

`main` is what every worker runs: BatchNorm as it is, or with statistics shared. Its task
comes on the command line, its result goes into a file. `train_alone` computes what needs no
processes: `local` and `joined` with an exchange every step, where the mean of the workers'
gradients is the gradient of one large batch, and `joined` with local steps.
"""

import hashlib
import math
import signal
import sys
import time
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
import zmq
from torch import nn

import shoestring
from benchmarks.batchnorm.cases import CASES, Draws, load_parts
from benchmarks.batchnorm.net import (
    JoinedNorm,
    LocalNorm,
    average,
    build_net,
    first_of,
    measure_accuracy,
    spread,
    to_input,
)
from shoestring.bench.data import Images
from shoestring.wire import frames
from shoestring.wire import messages as say

COUNTED = 32  # steps

Kind = Literal["local", "shared", "joined"]

_RATE = 0.05
_MOMENTUM = 0.9
_STEP_S = 2.0  # that a step may take, before a worker is given up
_START_S = 300.0


class Task(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One training."""

    case: str
    norm: Kind
    seed: int
    steps: int
    workers: int
    h: int = 1  # steps a round
    batch: int = 0  # of a worker, if not what the case says
    folder: str = ""  # where workers put their results
    data: str = ""  # the folder with the images, if one was named
    is_measured: bool = True  # by its accuracy
    is_counted: bool = False  # by the messages of its first steps

    def draws(self, images: Images) -> Draws:
        """The images of every step."""
        case = CASES[self.case]
        case = replace(case, batch=self.batch or case.batch)
        return Draws(case, images.labels, workers=self.workers, seed=self.seed)

    @property
    def policy(self) -> str:
        return "every" if self.h == 1 else f"local:{self.h}"


class Tally(msgspec.Struct):
    """Messages, and the bytes of their frames."""

    messages: int = 0
    size_bytes: int = 0


class Result(msgspec.Struct):
    """How it went for one worker."""

    accuracy: float | None
    parameters: str  # hashes: what is equal has equal ones
    buffers: str
    step_s: list[float]
    sent: Tally
    heard: Tally


def result_file(folder: Path, worker: int) -> Path:
    return folder / f"worker-{worker}.result"


def train_alone(task: Task, train: Images, test: Images) -> float:
    """Train all workers' replicas in this process; return the accuracy."""
    torch.manual_seed(task.seed)
    if task.h > 1:
        return _train_side_by_side(task, train, test)
    norm = partial(LocalNorm, workers=task.workers) if task.norm == "local" else nn.BatchNorm2d
    net = build_net(norm)
    optimizer, schedule = _optimizer(net, task.steps)
    draws = task.draws(train)
    for step in range(task.steps):
        chosen = draws.step(step).flatten()
        labels = torch.from_numpy(train.labels[chosen]).long()
        optimizer.zero_grad()
        torch.autograd.backward(nn.functional.cross_entropy(net(to_input(train.pixels[chosen])), labels))
        optimizer.step()
        schedule.step()
    return measure_accuracy(net, test)


def _train_side_by_side(task: Task, train: Images, test: Images) -> float:
    """Local steps of replicas whose values are normalised together."""
    count = task.workers
    net = build_net()
    replicas = build_net(partial(JoinedNorm, replicas=count), count)
    spread(net, replicas, count)
    optimizer, schedule = _optimizer(replicas, task.steps)
    draws = task.draws(train)
    for step in range(task.steps):
        chosen = draws.step(step).T  # [n, replicas]
        labels = torch.from_numpy(train.labels[chosen.flatten()]).long()
        told = replicas(to_input(train.pixels[chosen]).squeeze(1)).reshape(len(labels), -1)
        # The sum of the replicas' mean losses: each parameter meets its own, and others through the norms.
        loss = nn.functional.cross_entropy(told, labels, reduction="sum") / len(chosen)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        schedule.step()
        if (step + 1) % task.h == 0:
            average(replicas, count)
    return measure_accuracy(first_of(replicas), test)


def _optimizer(net: nn.Module, steps: int) -> tuple[torch.optim.SGD, Any]:
    optimizer = torch.optim.SGD(net.parameters(), _RATE, momentum=_MOMENTUM)
    return optimizer, _schedule(optimizer, steps)


def _schedule(optimizer: torch.optim.Optimizer, steps: int) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / steps))
    )


def train_as_worker(task: Task) -> None:
    """Take one worker's part in a run, and write down how it went."""
    signal.alarm(int(_START_S + _STEP_S * task.steps))  # no run is waited for without end
    torch.set_num_threads(1)
    world = shoestring.init()
    train, test = load_parts(Path(task.data) if task.data else None)
    torch.manual_seed(task.seed)
    model = build_net()
    if task.norm == "shared":
        model = shoestring.share_batchnorm(model)
    sgd = torch.optim.SGD(model.parameters(), _RATE, momentum=_MOMENTUM)
    # Buffers stay each worker's own: what their way costs is no cost of shared statistics.
    model, optimizer = shoestring.wrap(
        model, sgd, codec="float32", policy=task.policy, broadcast_buffers=False
    )
    schedule = _schedule(optimizer, task.steps)
    draws = task.draws(train)
    tallies = count_messages() if task.is_counted else (Tally(), Tally())
    counted = tallies
    step_s = []
    for step in range(task.steps):
        began = time.perf_counter()
        chosen = draws.step(step)[world.worker]
        labels = torch.from_numpy(train.labels[chosen]).long()
        optimizer.zero_grad()
        torch.autograd.backward(nn.functional.cross_entropy(model(to_input(train.pixels[chosen])), labels))
        optimizer.step()
        schedule.step()
        step_s.append(time.perf_counter() - began)
        if step < COUNTED:
            counted = (copy(tallies[0]), copy(tallies[1]))
    accuracy = None
    # Replicas that are equal in all need not all be measured.
    if task.is_measured and (world.worker == 0 or (task.norm == "local" and task.h > 1)):
        accuracy = measure_accuracy(model, test)
    result = Result(accuracy, optimizer.parameter_hash(), _hash_buffers(model), step_s, *counted)
    result_file(Path(task.folder), world.worker).write_bytes(msgspec.json.encode(result))


def count_messages() -> tuple[Tally, Tally]:
    """Count what this process sends and receives for rounds from now on, but not what is repeated."""
    sent, heard = Tally(), Tally()
    sockets: Any = zmq.Socket
    send, receive = sockets.send_multipart, sockets.recv_multipart

    def counted_send(self: Any, parts: Any, *args: Any, **options: Any) -> Any:
        _count(sent, parts)
        return send(self, parts, *args, **options)

    def counted_receive(self: Any, *args: Any, **options: Any) -> Any:
        received = receive(self, *args, **options)
        _count(heard, [frame.buffer for frame in received])
        return received

    sockets.send_multipart = counted_send
    sockets.recv_multipart = counted_receive
    return sent, heard


def _count(tally: Tally, parts: Sequence[frames.Buffer]) -> None:
    message = frames.decode(parts)[0]
    joins = isinstance(message, say.Full) and not message.seq  # late, as its question was repeated
    if not joins and not isinstance(message, say.Beat | say.Ask | say.Missing):
        tally.messages += 1
        tally.size_bytes += sum(memoryview(part).nbytes for part in parts)


def _hash_buffers(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, buffer in model.named_buffers():
        digest.update(name.encode() + buffer.numpy().tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    train_as_worker(msgspec.json.decode(sys.argv[1], type=Task))
