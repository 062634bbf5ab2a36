"""`shoestring demo`: one training twice over a slow link, uncompressed and with `auto`.

Two hosts are emulated on this machine, each with a worker and a shard in processes of
their own. What goes from one to the other crosses a link of a fixed rate, in user space;
what stays on a host does not. Both runs do the same steps on the same batches.
"""

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoestring.bench.link.slowlink import SlowLink
from shoestring.config import Run
from shoestring.errors import ShoestringError
from shoestring.launch.local import run_local
from shoestring.server.warmup import warm_up

RATE_MBIT_S = 20.0
CODECS = ("float32", "auto")
_STEPS, _COMPUTE_S = 150, 0.05
_FLOAT_BITS = 2 * 32 * 207_000  # that cross the link in a round, there and then back


@dataclass(frozen=True)
class DemoRow:
    """How one of the two trainings went."""

    name: str
    seconds: float
    bytes_sent: int  # and received, by all workers
    accuracy: float
    loss: list[tuple[float, float]]  # seconds since the start, loss of the first worker


def run_demo(folder: Path, *, rate_mbit_s: float = RATE_MBIT_S, say: Callable[[str], None]) -> list[DemoRow]:
    """Run both trainings and return how they went; event logs stay in `folder`."""
    say("loading kernels; the first time on a machine they are compiled, which takes about a minute")
    warm_up()
    rows = []
    for codec in CODECS:
        say(f"training with codec {codec} over {rate_mbit_s:g} Mbit/s")
        rows.append(_train(codec, folder / codec, rate_mbit_s))
        row = rows[-1]
        say(f"{codec}: {row.seconds:.1f} s, {row.bytes_sent / 1e6:.1f} MB, {100 * row.accuracy:.2f} % right")
    return rows


def _train(codec: str, folder: Path, rate_mbit_s: float) -> DemoRow:
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.json*"):
        old.unlink()
    with SlowLink(rate_mbit_s) as link:

        def reach(worker: int, addresses: Sequence[str]) -> tuple[str, ...]:
            """How the worker on one host sees the shards: the left host's, the right host's."""
            left, right = addresses
            return (left, link.toward_right(right)) if worker == 0 else (link.toward_left(left), right)

        outcome = run_local(
            ["-m", "shoestring.bench.demo.training", str(folder)],
            Run(name=f"demo-{codec}", workers=2, folder=folder, codec=codec),
            shards=2,
            threads=1,
            reach=reach,
        )
    if outcome.failure is not None:
        raise ShoestringError(
            f"{outcome.failure.who} of the demo failed with exit code {outcome.failure.code}",
            hint="its last lines are above; the event logs are in " + f"`{folder}`",
        )
    results = [json.loads((folder / f"worker-{worker}.json").read_text()) for worker in range(2)]
    if results[0]["hash"] != results[1]["hash"]:
        raise ShoestringError("the workers ended with different parameters", hint="please report this")
    return DemoRow(
        codec,
        max(result["seconds"] for result in results),
        sum(result["bytes_sent"] for result in results),
        results[0]["accuracy"],
        results[0]["loss"],
    )


def draw(rows: Sequence[DemoRow], folder: Path) -> list[Path]:
    """Draw loss against time and the bars of bytes, as PNG and as a page that works offline."""
    from shoestring.bench.demo.chart import draw_page, draw_picture

    return [draw_picture(rows, folder / "demo.png"), draw_page(rows, folder / "demo.html")]


def main_folder() -> Path:
    """A fresh folder for a demo's logs and charts."""
    return Path(tempfile.mkdtemp(prefix="shoestring-demo-"))


def expect(rate_mbit_s: float) -> str:
    """Say what will happen and about how long it takes."""
    plain_s = _STEPS * (_FLOAT_BITS / (1e6 * rate_mbit_s) + _COMPUTE_S)
    return (
        "Two emulated hosts train a small residual net with BatchNorm on digits, "
        f"over a link of {rate_mbit_s:g} Mbit/s:\nfirst uncompressed, about {plain_s:.0f} s, "
        "then the same steps with codec `auto`: look for a fraction of the time and the bytes."
    )
