"""What a round costs, against gloo's all-reduce of the same bytes on the same link.

Two workers and two shards, a process each, one of both kinds on each host; the
workers exchange through what a training script uses, `SharedOptimizer.step`. Every
round and every all-reduce begins when all workers are ready and ends when the last has its result.
Contestants take turns in blocks of a few, so that a busy machine slows all alike; a
figure is the median over the blocks of the fastest in each.

Nothing is reported that is not right: parameters must have the bits that a plain loop
gives, and be the same on all workers to the end; gloo's sum must be NumPy's.
"""

import contextlib
import os
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shoestring.bench.codec.report import print_table
from shoestring.bench.link import hosts as network
from shoestring.bench.link.hosts import HOSTS, Hosts
from shoestring.bench.link.peers import Peer, ask_all, started
from shoestring.bench.recipe import Progress
from shoestring.codec.registry import LOSSLESS, make
from shoestring.errors import ShoestringError
from shoestring.launch.shard import local_address
from shoestring.wire import keys

CODECS = ("float32", "dct:step=4.0", "dct:bits=0.1")  # both about 0.1 bit a value here
_WARMUP = 2
_RUN = "bench"


@dataclass(frozen=True)
class Effort:
    """How much is measured: parameters, blocks, and by link the rounds a block."""

    size_mb: float = 40.0
    blocks: int = 7
    times: dict[str, int] = field(default_factory=lambda: {"loopback": 5, "1gbit": 3, "100mbit": 1})


FULL = Effort()
QUICK = Effort(size_mb=1.0, blocks=2, times={"loopback": 2, "1gbit": 2, "100mbit": 1})


@dataclass(frozen=True)
class Row:
    """One codec on one link. Bytes are one worker's, on the wire, a round."""

    codec: str
    link: str
    workers: int
    shards: int
    size_mb: float
    round_ms: float
    round_min_ms: float
    gloo_allreduce_ms: float
    gloo_min_ms: float
    ratio: float  # of `round_ms` to `gloo_allreduce_ms`
    up_bytes: int
    down_bytes: int
    has_keys: bool
    limit_ms: float | None  # what these bytes take on this link at least; None: no limit
    limit_fraction: float | None  # `limit_ms` over `round_ms`
    blocks: int
    rounds: int
    correct: bool  # always true: what is wrong raises


@dataclass(frozen=True)
class Found:
    """What was measured on which links, and which links were left out: their `link` and the `reason`."""

    rows: list[Row]
    left_out: list[dict[str, str]]


def measure(links: Sequence[str], effort: Effort, codecs: Sequence[str], progress: Progress) -> Found:
    """Measure every link that can be had."""
    reasons = {link: network.missing(link) for link in links}
    rows: list[Row] = []
    for link in links:
        if not reasons[link]:
            with network.connected(link) as hosts:
                rows += measure_link(hosts, effort, codecs, progress)
    return Found(rows, [{"link": link, "reason": why} for link, why in reasons.items() if why])


def measure_link(
    hosts: Hosts,
    effort: Effort,
    codecs: Sequence[str] = CODECS,
    progress: Progress = lambda what, done, total: None,
) -> list[Row]:
    """Measure codecs and gloo between hosts."""
    values, rounds = int(effort.size_mb * 1e6) // 4, effort.times[hosts.link]
    contestants = ("gloo", *codecs)
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    traffic = dict.fromkeys(codecs, (0, 0))
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        key_folder = _make_keys(folder) if hosts.are_apart else None
        progress(f"starting workers and shards on `{hosts.link}`", 0, effort.blocks)
        workers = stack.enter_context(_workers(hosts, values, codecs, folder / "store"))
        for codec in codecs:
            stack.enter_context(_joined(hosts, workers, codec, key_folder))
            ask_all(workers, do="rounds", codec=codec, times=_WARMUP)
            _check(workers, codec, is_replayed=True)
        ask_all(workers, do="reduce", times=1)
        for block in range(effort.blocks):
            progress(f"measuring rounds on `{hosts.link}`", block, effort.blocks)
            for name in contestants:
                do = {"do": "reduce"} if name == "gloo" else {"do": "rounds", "codec": name}
                answers = ask_all(workers, times=rounds, **do)
                each = zip(*(answer["seconds"] for answer in answers), strict=True)
                seconds[name].append(min(max(times) for times in each))
                if name == "gloo":
                    _require(all(answer["is_right"] for answer in answers), "gloo", "its sum is wrong")
                else:
                    traffic[name] = (answers[0]["up"], answers[0]["down"])
        for codec in codecs:
            _check(workers, codec, is_replayed=make(codec).name == LOSSLESS)
    rate = hosts.rate_bits_s
    rows = []
    for codec in codecs:
        up, down = (count // rounds for count in traffic[codec])
        round_ms = 1e3 * statistics.median(seconds[codec])
        gloo_ms = 1e3 * statistics.median(seconds["gloo"])
        # A host sends its worker's pushes to the other shards, its shard's answers to the other workers.
        limit_ms = None if rate is None else 8e3 * (HOSTS - 1) / HOSTS * (up + down) / rate
        rows.append(
            Row(
                codec=codec,
                link=hosts.link,
                workers=HOSTS,
                shards=HOSTS,
                size_mb=4e-6 * values,
                round_ms=round_ms,
                round_min_ms=1e3 * min(seconds[codec]),
                gloo_allreduce_ms=gloo_ms,
                gloo_min_ms=1e3 * min(seconds["gloo"]),
                ratio=round_ms / gloo_ms,
                up_bytes=up,
                down_bytes=down,
                has_keys=key_folder is not None,
                limit_ms=limit_ms,
                limit_fraction=None if limit_ms is None else limit_ms / round_ms,
                blocks=effort.blocks,
                rounds=effort.blocks * rounds,
                correct=True,
            )
        )
    return rows


def show(found: Found) -> None:
    """Print a table, and what it lacks."""
    print_table(
        "a round against gloo's all-reduce",
        ("codec", "link", "MB", "round ms", "gloo ms", "ratio", "of the link"),
        [
            (
                *(row.codec, row.link, f"{row.size_mb:g}"),
                *(f"{row.round_ms:.1f}", f"{row.gloo_allreduce_ms:.1f}", f"{row.ratio:.3f}"),
                "" if row.limit_fraction is None else f"{row.limit_fraction:.1%}",
            )
            for row in found.rows
        ],
    )
    for left in found.left_out:
        print(f" {left['link']} is left out: {left['reason']}")


@contextlib.contextmanager
def _workers(hosts: Hosts, values: int, codecs: Sequence[str], store: Path) -> Iterator[list[Peer]]:
    with contextlib.ExitStack() as stack:
        workers = []
        for index in range(HOSTS):
            told = {
                "be": "worker",
                "worker": index,
                "workers": HOSTS,
                "values": values,
                "store": str(store),
                "card": hosts.card,
                "codecs": list(codecs),
            }
            workers.append(stack.enter_context(started(hosts, index, f"worker {index}", told)))
        for worker in workers:
            worker.hear()
        yield workers


@contextlib.contextmanager
def _joined(hosts: Hosts, workers: list[Peer], codec: str, key_folder: Path | None) -> Iterator[None]:
    """Start the shards of a run and have the workers enter it."""
    key_text = None if key_folder is None else str(key_folder)
    with contextlib.ExitStack() as stack:
        shards = []
        # On one machine shards listen where `shoestring run` has them listen.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shoestring-")))
        for index in range(HOSTS):
            told = {
                "be": "shard",
                "index": index,
                "shards": HOSTS,
                "run": _RUN,
                "address": "tcp://*:0" if hosts.are_apart else local_address(folder, index),
                "keys": key_text,
                "codecs": [codec],
                # Hosts share this machine's cores.
                "threads": max(1, len(os.sched_getaffinity(0)) // HOSTS),
            }
            shards.append(stack.enter_context(started(hosts, index, f"shard {index}", told)))
        bound = [shard.hear()["address"] for shard in shards]
        for index, worker in enumerate(workers):
            addresses = bound
            if hosts.are_apart:
                ports = [address.rpartition(":")[2] for address in bound]
                addresses = [f"tcp://{hosts.address(at, index)}:{port}" for at, port in enumerate(ports)]
            worker.tell(do="join", run=_RUN, codec=codec, shards=addresses, keys=key_text)
        for worker in workers:
            worker.hear()
        yield
        ask_all(workers, do="leave", codec=codec)


def _make_keys(folder: Path) -> Path:
    made = folder / "keys"
    keys.new(keys.SHARD, made)
    for index in range(HOSTS):
        keys.new(f"worker-{index}", made)
    return made


def _check(workers: list[Peer], codec: str, *, is_replayed: bool) -> None:
    for worker in workers:
        worker.tell(do="digest", codec=codec, replay=is_replayed and worker is workers[0])
    found = [worker.hear() for worker in workers]
    _require(len({answer["found"] for answer in found}) == 1, codec, "workers hold different parameters")
    wanted = found[0].get("wanted")
    _require(
        wanted in (None, found[0]["found"]),
        codec,
        f"after {found[0]['rounds']} rounds the parameters are not what a plain loop gives",
    )


def _require(holds: bool, who: str, problem: str) -> None:
    if not holds:
        raise ShoestringError(f"`{who}` is not timed: {problem}", hint="please report this")
