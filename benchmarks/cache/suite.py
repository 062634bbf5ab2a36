"""Two jobs on one dataset: each with a loader of its own, then sharing the cache.

Two processes go through the same pictures at the same time, in batches, with torch's own
loader. Decoding is the work: JPEG, made half as large, as training on photographs does it.
First both decode everything themselves; then they begin with an empty cache and share it; then
they go through it once more. The three take turns, so that a busy machine meets all of them.

A time counts only if both jobs got every sample with the same checksum as without a cache, and
if together they decoded each sample exactly once. Otherwise there are no figures.
"""

import io
import multiprocessing
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoestring.bench.data import Images, load_images
from shoestring.bench.recipe import Progress
from shoestring.errors import ShoestringError, UsageError

JOBS = 2
ORDERS = ("own", "same")  # each job in an order of its own, or all in the same one
BATCH = 32
TILES = 16  # small pictures a side of a large one
SIDE = 224  # of what comes out
_QUALITY = 90
_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Effort:
    pictures: int
    blocks: int


QUICK = Effort(pictures=160, blocks=1)
FULL = Effort(pictures=640, blocks=5)


@dataclass(frozen=True)
class Row:
    """Samples a second of both jobs together, medians over the blocks."""

    order: str
    jobs: int
    pictures: int
    sample_bytes: int
    private_samples_s: float
    shared_samples_s: float  # from an empty cache
    again_samples_s: float  # from a full one
    ratio: float  # shared over private: the median of the blocks' own ratios
    again_ratio: float
    private_decodes: int  # a block
    shared_decodes: int
    blocks: int
    correct: bool


@dataclass(frozen=True)
class Task:
    """One way through the pictures."""

    seed: int
    cache: str  # the version of the cached dataset; empty for none


@dataclass(frozen=True)
class Pass:
    """What a job reports of it."""

    decoded: int
    checksums: NDArray[np.uint32]  # by index


class Pictures:
    """JPEG files in memory, decoded when asked for."""

    def __init__(self, files: list[bytes], labels: list[int]) -> None:
        self.files = files
        self.labels = labels
        self.decoded = 0

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Any, int, int]:
        import torch
        from PIL import Image

        self.decoded += 1
        with Image.open(io.BytesIO(self.files[index])) as picture:
            small = picture.convert("RGB").resize((SIDE, SIDE))
        return torch.from_numpy(np.array(small)).permute(2, 0, 1).contiguous(), self.labels[index], index


def measure(effort: Effort, progress: Progress, data: Path | None = None) -> list[Row]:
    """Return a row for each order."""
    pictures = make_pictures(load_images(data), effort.pictures)
    rows = []
    with _folder() as folder, _jobs(pictures, folder) as jobs:
        for order in ORDERS:
            blocks = []
            for block in range(effort.blocks):
                progress(f"two jobs, `{order}` order", block, effort.blocks)
                blocks.append(_measure_block(jobs, len(pictures), order, block))
            rows.append(_summarise(order, effort, blocks))
    return rows


def make_pictures(images: Images, count: int) -> Pictures:
    """Make large pictures of small ones, as JPEG."""
    try:
        from PIL import Image
    except ImportError:
        raise UsageError(
            "pictures are made with Pillow, which is not installed", hint="`pip install 'shoestring[bench]'`"
        ) from None
    source = np.random.default_rng(0)
    files, labels = [], []
    for _ in range(count):
        chosen = source.integers(0, len(images.pixels), TILES * TILES)
        tiles = images.pixels[chosen].reshape(TILES, TILES, *images.pixels.shape[1:])
        file = io.BytesIO()
        large = tiles.swapaxes(1, 2).reshape(TILES * tiles.shape[2], -1)
        Image.fromarray(large).convert("RGB").save(file, "JPEG", quality=_QUALITY)
        files.append(file.getvalue())
        labels.append(int(images.labels[chosen[0]]))
    return Pictures(files, labels)


def _measure_block(jobs: list[Connection], count: int, order: str, block: int) -> dict[str, float]:
    """Both jobs alone, sharing, and sharing again; checked against each other."""
    seeds = [block if order == "same" else JOBS * block + job for job in range(JOBS)]
    version = f"{order}-{block}"
    alone_s, alone = _run(jobs, [Task(seed, "") for seed in seeds])
    shared_s, shared = _run(jobs, [Task(seed, version) for seed in seeds])
    again_s, again = _run(jobs, [Task(seed, version) for seed in seeds])
    decodes = [sum(one.decoded for one in passes) for passes in (alone, shared, again)]
    if decodes != [JOBS * count, count, 0]:
        raise ShoestringError(
            f"{count} samples were decoded {decodes[1]} and then {decodes[2]} times, expected {count} and 0",
            hint="make room in shared memory: see `df /dev/shm`",
        )
    if not all(np.array_equal(one.checksums, alone[0].checksums) for one in (*alone, *shared, *again)):
        raise ShoestringError("the cache gave other samples than the dataset", hint="please report this")
    return {"alone_s": alone_s, "shared_s": shared_s, "again_s": again_s}


def _run(jobs: list[Connection], tasks: list[Task]) -> tuple[float, list[Pass]]:
    """Let both jobs go at once; return the time until the last is done."""
    start = time.perf_counter()
    for job, task in zip(jobs, tasks, strict=True):
        job.send(task)
    passes: list[Pass] = []
    for job in jobs:
        if not job.poll(_TIMEOUT_S):
            raise ShoestringError(f"a job said nothing for {_TIMEOUT_S:g} s", hint="try `--quick`")
        passes.append(job.recv())
    return time.perf_counter() - start, passes


def _summarise(order: str, effort: Effort, blocks: list[dict[str, float]]) -> Row:
    def rate(key: str) -> float:
        return statistics.median(JOBS * effort.pictures / block[key] for block in blocks)

    return Row(
        order=order,
        jobs=JOBS,
        pictures=effort.pictures,
        sample_bytes=3 * SIDE * SIDE,
        private_samples_s=rate("alone_s"),
        shared_samples_s=rate("shared_s"),
        again_samples_s=rate("again_s"),
        ratio=statistics.median(block["alone_s"] / block["shared_s"] for block in blocks),
        again_ratio=statistics.median(block["alone_s"] / block["again_s"] for block in blocks),
        private_decodes=JOBS * effort.pictures,
        shared_decodes=effort.pictures,
        blocks=effort.blocks,
        correct=True,
    )


@contextmanager
def _folder() -> Iterator[Path]:
    """A cache of the benchmark's own, in memory."""
    folder = Path(tempfile.mkdtemp(prefix="shoestring-bench-", dir="/dev/shm"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _jobs(pictures: Pictures, folder: Path) -> Iterator[list[Connection]]:
    context = multiprocessing.get_context("spawn")
    ends, processes = [], []
    try:
        for _ in range(JOBS):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, pictures, folder), daemon=True)
            process.start()
            there.close()
            ends.append(here)
            processes.append(process)
        for end in ends:
            end.recv()  # ready: imports are not timed
        yield ends
    except EOFError:
        raise ShoestringError("a job ended before it was done", hint="its own error is above") from None
    finally:
        for process in processes:
            process.kill()
            process.join()


def _serve(parent: Connection, pictures: Pictures, folder: Path) -> None:
    import torch

    from shoestring.cache.dataset import cached

    torch.set_num_threads(1)
    pictures[0]
    parent.send("ready")
    while True:
        task: Task = parent.recv()
        pictures.decoded = 0
        dataset: Any = pictures
        if task.cache:
            dataset = cached(pictures, name="pictures", version=task.cache, folder=folder)
        checksums = _walk(dataset, task.seed)
        parent.send(Pass(pictures.decoded, checksums))


def _walk(dataset: Any, seed: int) -> NDArray[np.uint32]:
    """Go through all samples once; return their checksums by index."""
    import google_crc32c
    import torch

    order = torch.Generator().manual_seed(seed)
    loader = torch.utils.data.DataLoader(dataset, BATCH, shuffle=True, generator=order)
    checksums = np.zeros(len(dataset), np.uint32)
    for images, labels, indices in loader:
        for image, label, index in zip(images.numpy(), labels.tolist(), indices.tolist(), strict=True):
            checksums[index] = google_crc32c.extend(label, image.reshape(-1))
    return checksums
