"""One process of `shoestring bench wire`: a shard, or a worker that does as it is told.

Speaks lines of JSON: the first argument says what to be, then commands come on stdin and
answers go to stdout. The end of stdin ends the process, so none outlives the benchmark.
"""

import contextlib
import json
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import zmq

from shoestring.bench.wire import likeness, replay
from shoestring.config import Run
from shoestring.errors import ShoestringError
from shoestring.observe.events import EventLog
from shoestring.server.serve import Service, listen
from shoestring.server.shard import Shard
from shoestring.server.warmup import warm_up
from shoestring.wire.keys import keys_from_folder

if TYPE_CHECKING:
    from shoestring.worker.optimizer import SharedOptimizer
    from shoestring.worker.session import Session

_SMALL = 100_000  # values: every kind of tensor that `likeness` has


def be_shard(told: dict[str, Any], say: Callable[[dict[str, Any]], None]) -> None:
    """Serve one shard until stdin ends."""
    keys = keys_from_folder(Path(told["keys"]), "shard") if told["keys"] else None
    with zmq.Context() as context:
        listener = listen(context, told["address"], keys=keys)
        is_local = told["address"].startswith("ipc:")
        shard = Shard(told["index"], told["shards"], told["run"], is_sharing=is_local)
        service = Service(shard, listener, threads=told["threads"])

        def watch() -> None:
            sys.stdin.read()
            service.stop()

        threading.Thread(target=watch, daemon=True).start()
        say({"address": listener.address})
        try:
            service.run()
        finally:
            listener.close()


class Worker:
    """A worker of several runs at once, one a codec, with gloo's all-reduce beside them."""

    def __init__(self, told: dict[str, Any]) -> None:
        import torch

        torch.set_num_threads(1)
        self.index, self.workers, self.values = told["worker"], told["workers"], told["values"]
        self._gradients = likeness.Gradients(self.values, self.index)
        self._runs: dict[str, tuple[Session, SharedOptimizer]] = {}
        self._sum: Any = None  # of all workers' gradients, as gloo must find it
        self._has_gloo = bool(told["store"])
        if self._has_gloo:
            os.environ["GLOO_SOCKET_IFNAME"] = told["card"]
            torch.distributed.init_process_group(
                "gloo", init_method=f"file://{told['store']}", rank=self.index, world_size=self.workers
            )

    def join(self, told: dict[str, Any]) -> dict[str, Any]:
        """Enter a run with a model of its own."""
        from shoestring.worker.rounds.policy import EveryStep
        from shoestring.worker.session import Session
        from shoestring.worker.wrap import join

        run = Run(
            name=told["run"],
            worker=self.index,
            workers=self.workers,
            shards=tuple(told["shards"]),
            keys=Path(told["keys"]) if told["keys"] else None,
        )
        here = Session(run, secrets.token_hex(8), EventLog(None, "bench"))
        model, inner = self.model()
        _, optimizer = join(
            here,
            model,
            inner,
            codec=told["codec"],
            policy=EveryStep(delay=0),
            clip_norm=0.0,
        )
        self._runs[told["codec"]] = (here, optimizer)
        return {}

    def rounds(self, told: dict[str, Any]) -> dict[str, Any]:
        """Take part in rounds, each timed from when all workers are ready."""
        _, optimizer = self._runs[told["codec"]]
        traffic = optimizer.driver.coder.exchange.traffic
        up, down = traffic.up, traffic.down

        def prepare() -> None:
            self.set_gradients(optimizer, optimizer.steps + 1)

        seconds = self._time(told["times"], prepare, optimizer.step)
        return {"seconds": seconds, "up": traffic.up - up, "down": traffic.down - down}

    def reduce(self, told: dict[str, Any]) -> dict[str, Any]:
        """Take part in gloo's all-reduce, and look whether the sum is right."""
        import numpy as np
        import torch

        gradient = torch.from_numpy(self._gradients.of(0))
        buffer = torch.empty_like(gradient)
        seconds = self._time(
            told["times"],
            lambda: buffer.copy_(gradient),
            lambda: torch.distributed.all_reduce(buffer),
        )
        if self._sum is None:
            self._sum = sum(likeness.Gradients(self.values, worker).of(0) for worker in range(self.workers))
        return {"seconds": seconds, "is_right": bool(np.array_equal(buffer.numpy(), self._sum))}

    def digest(self, told: dict[str, Any]) -> dict[str, Any]:
        """Hash the parameters; where asked, also what they must be."""
        _, optimizer = self._runs[told["codec"]]
        found = {"found": optimizer.parameter_hash(), "rounds": optimizer.steps}
        if told["replay"]:
            found["wanted"] = replay.digest(self.values, told["codec"], self.workers, optimizer.steps)
        return found

    def leave(self, told: dict[str, Any]) -> dict[str, Any]:
        """Leave a run."""
        self._runs.pop(told["codec"])[0].close()
        return {}

    def close(self) -> None:
        import torch

        for here, _ in self._runs.values():
            here.close()
        if self._has_gloo:
            torch.distributed.destroy_process_group()

    def model(self) -> tuple[Any, Any]:
        """Make a model and torch's own optimizer for it."""
        import torch

        flat = torch.from_numpy(likeness.parameters(self.values))
        model = torch.nn.ParameterList(
            torch.nn.Parameter(tensor.clone()) for tensor in _tensors(flat, likeness.shapes(self.values))
        )
        return model, torch.optim.SGD(model.parameters(), replay.RATE, momentum=replay.MOMENTUM)

    def set_gradients(self, optimizer: Any, number: int) -> None:
        """Give a model the gradients of a round."""
        import torch

        flat = torch.from_numpy(self._gradients.of(number))
        for parameter, tensor in zip(
            optimizer.param_groups[0]["params"], _tensors(flat, likeness.shapes(self.values)), strict=True
        ):
            parameter.grad = tensor

    def _time(self, times: int, prepare: Callable[[], object], act: Callable[[], object]) -> list[float]:
        import torch

        seconds = []
        for _ in range(times):
            prepare()
            if self._has_gloo:
                torch.distributed.barrier()
            start = time.perf_counter()
            act()
            seconds.append(time.perf_counter() - start)
        return seconds


def _tensors(flat: Any, shapes: list[tuple[int, ...]]) -> list[Any]:
    from math import prod

    pieces = flat.split([prod(shape) for shape in shapes])
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def take_stdout() -> Callable[[dict[str, Any]], None]:
    """Keep stdout for answers: what libraries print there goes to stderr."""
    answers: TextIO = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(answer: dict[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(answer), file=answers, flush=True)

    return say


def rehearse(codecs: list[str]) -> None:
    """Compile: it takes longer than a shard waits for a worker, and memory counts from here."""
    warm_up()
    for codec in codecs:
        replay.digest(_SMALL, codec, 1, 1)


def obey(
    actions: Mapping[str, Callable[[Any], dict[str, Any]]], say: Callable[[dict[str, Any]], None]
) -> None:
    """Carry out the commands that come on stdin until it ends."""
    say({})
    for line in sys.stdin:
        command = json.loads(line)
        say(actions[command["do"]](command))


def be_worker(told: dict[str, Any], say: Callable[[dict[str, Any]], None]) -> None:
    """Carry out commands until stdin ends."""
    worker = Worker(told)
    actions = {
        "join": worker.join,
        "rounds": worker.rounds,
        "reduce": worker.reduce,
        "digest": worker.digest,
        "leave": worker.leave,
    }
    try:
        obey(actions, say)
    finally:
        worker.close()


def main() -> None:
    say = take_stdout()
    told = json.loads(sys.argv[1])
    rehearse(told["codecs"])
    try:
        (be_shard if told["be"] == "shard" else be_worker)(told, say)
    except ShoestringError as error:
        say({"error": error.message, "hint": error.hint})
        sys.exit(1)


if __name__ == "__main__":
    main()
