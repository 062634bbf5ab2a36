"""What a step costs on a link with delay: with BatchNorm as it is, shared, and joined.

Two emulated hosts, each with a worker and a shard; what goes from one to the other takes
`DELAY_S`, each way. `local` and `shared` are measured in runs that take turns.

`joined` is emulated, as torch has no such layer on a CPU: two all-reduces a layer, one in
the forward and one in the backward pass, each after the other, of the sizes that
SyncBatchNorm sends. An all-reduce is taken to be one message each way at the same time,
the least it can be between two hosts. They are timed on the same link between the runs,
and added to the step with BatchNorm as it is.
"""

import socket
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec

from benchmarks.batchnorm.runs import run_workers, step_ms_of
from benchmarks.batchnorm.training import Kind, Task
from shoestring.bench.link.slowlink import SlowLink

DELAY_S = 0.02
_HOSTS = 2
_SKIPPED = 5  # first steps: links open, buffers are made
_TIMES = 5  # that a step's all-reduces are timed between two runs
_TIMEOUT_S = 30.0
_FLOAT = 4


@dataclass(frozen=True)
class DelayRow:
    """Median times of a step, and what they are against those with BatchNorm as it is."""

    norm: str
    workers: int
    batch: int
    delay_ms: float
    step_ms: float
    ratio: float  # the median of the repeats' own ratios
    repeats: int
    steps: int  # a repeat
    is_emulated: bool


def measure_delay(
    task: Task, widths: Sequence[int], *, repeats: int, say: Callable[[str], None]
) -> list[DelayRow]:
    """Time `task` on two hosts with its batch; `widths` are the channels of the net's norms."""
    times_ms: dict[str, list[float]] = {"local": [], "shared": [], "joined": []}
    kinds: tuple[Kind, ...] = ("local", "shared")
    with SlowLink(None, DELAY_S) as link:

        def reach(worker: int, addresses: Sequence[str]) -> tuple[str, ...]:
            """How the worker on one host sees the shards: the left host's, the right host's."""
            left, right = addresses
            return (left, link.toward_right(right)) if worker == 0 else (link.toward_left(left), right)

        for repeat in range(repeats):
            for kind in kinds if repeat % 2 == 0 else kinds[::-1]:
                say(f"{1e3 * DELAY_S:g} ms delay, batch {task.batch}: {kind}, {repeat + 1} of {repeats}")
                own = msgspec.structs.replace(task, norm=kind, workers=_HOSTS, is_measured=False)
                times_ms[kind].append(step_ms_of(run_workers(own, reach)[0], own.h, _SKIPPED))
            say("  " + ", ".join(f"{kind} {times_ms[kind][-1]:.1f} ms a step" for kind in kinds))
            times_ms["joined"].append(times_ms["local"][-1] + time_exchanges(link, exchange_sizes(widths)))
    rows = []
    for norm, own_ms in times_ms.items():
        ratios = [mine / plain for mine, plain in zip(own_ms, times_ms["local"], strict=True)]
        rows.append(
            DelayRow(
                norm=norm,
                workers=_HOSTS,
                batch=task.batch,
                delay_ms=1e3 * DELAY_S,
                step_ms=statistics.median(own_ms),
                ratio=statistics.median(ratios),
                repeats=repeats,
                steps=task.steps,
                is_emulated=norm == "joined",
            )
        )
    return rows


def exchange_sizes(widths: Sequence[int]) -> list[int]:
    """Bytes of a step's all-reduces: mean, variance and count forward; two sums a channel backward."""
    forward = [_FLOAT * (2 * width + 1) for width in widths]
    return forward + [_FLOAT * 2 * width for width in reversed(widths)]


def time_exchanges(link: SlowLink, sizes: Sequence[int]) -> float:
    """The median time of all exchanges of a step, one after the other, in ms."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as other:
        listener.settimeout(_TIMEOUT_S)
        port = int(link.toward_right(f"tcp://127.0.0.1:{listener.getsockname()[1]}").rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), _TIMEOUT_S) as left:
            right = listener.accept()[0]
            with right:
                right.settimeout(_TIMEOUT_S)
                done = other.submit(_exchange, right, sizes)
                times_s = _exchange(left, sizes)
                done.result(_TIMEOUT_S)
    return 1e3 * statistics.median(times_s)


def _exchange(end: socket.socket, sizes: Sequence[int]) -> list[float]:
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    times_s = []
    for _ in range(_TIMES):
        began = time.perf_counter()
        for size in sizes:
            end.sendall(bytes(size))
            while size:
                received = len(end.recv(size))
                if not received:
                    raise ConnectionError("the other end closed")
                size -= received
        times_s.append(time.perf_counter() - began)
    return times_s
