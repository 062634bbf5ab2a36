"""`python -m benchmarks.gpu.fleet`: memory and speed of jobs on a GPU, against what profiles predict.

Needs torch alone. Each of three models is trained in a process of its own at three small batch sizes; from
there the way a profile goes leads up to the largest size that fits `--limit-gib`: each size is predicted
from smaller ones, then trained and measured. Then pairs of models are trained at once, each in its process,
and their speeds set against what the busy parts of both, measured alone, predict.
"""

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Annotated, Any

import typer

from benchmarks.command import Command, say
from shoestring.cli.bench.options import AsJson, Output, check_output, deliver
from shoestring.fleet.measure.fit import near_line, next_size
from shoestring.fleet.measure.interference import Load, predict

SMALL = {"conv": (16, 32, 64), "gpt": (4, 8, 16), "mlp": (256, 512, 1024)}
SPAN = 256  # the largest size offered is this many times the largest small one
PAIR_SIZES = {"conv": 64, "gpt": 16, "mlp": 256, "host": 64}
PAIRS = (("conv", "gpt"), ("gpt", "gpt"), ("host", "gpt"), ("host", "host"), ("conv", "host"))
WARMUP, SOLO_S, PAIR_S = 10, 3.0, 6.0
LIMIT_S = 150.0


def build(name: str, torch: Any) -> tuple[Any, Callable[[int], Any]]:
    """Return a model on the GPU and what computes its loss at a batch size."""
    nn = torch.nn
    device = "cuda"
    if name == "conv":

        def block(a: int, b: int, stride: int) -> Any:
            return nn.Sequential(
                nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True),
                nn.Conv2d(b, b, 3, 1, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True),
            )  # fmt: skip

        widths = (64, 128, 256, 512)
        stages = [block(a, b, 2) for a, b in itertools.pairwise((64, *widths))]
        head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000)]
        model = nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3), nn.ReLU(inplace=True), *stages, *head)

        def data(batch: int) -> Any:
            images = torch.randn(batch, 3, 224, 224, device=device)
            return images, torch.randint(0, 1000, (batch,), device=device)

    elif name == "gpt":
        width, length, words = 1024, 512, 16_000
        layer = nn.TransformerEncoderLayer(
            width, 16, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        body = nn.TransformerEncoder(layer, 8, enable_nested_tensor=False)

        class Gpt(nn.Module):  # type: ignore[name-defined, misc]
            def __init__(self) -> None:
                super().__init__()
                self.words, self.body, self.head = nn.Embedding(words, width), body, nn.Linear(width, words)
                self.mask = nn.Transformer.generate_square_subsequent_mask(length, device=device)

            def forward(self, x: Any) -> Any:
                return self.head(self.body(self.words(x), mask=self.mask, is_causal=True)).flatten(0, 1)

        model = Gpt()

        def data(batch: int) -> Any:
            x = torch.randint(0, words, (batch, length), device=device)
            return x, x.roll(-1, 1).flatten()

    else:  # `mlp`: wide; `host`: many small layers, so that launching them takes longer than running them
        width, depth = (8192, 6) if name == "mlp" else (256, 60)
        layers = [part for _ in range(depth) for part in (nn.Linear(width, width), nn.GELU())]
        model = nn.Sequential(*layers, nn.Linear(width, 100))

        def data(batch: int) -> Any:
            return torch.randn(batch, width, device=device), torch.randint(0, 100, (batch,), device=device)

    model = model.to(device)

    def loss(batch: int) -> Any:
        x, y = data(batch)
        with torch.autocast("cuda", torch.bfloat16):
            return nn.functional.cross_entropy(model(x), y)

    return model, loss


class Trainer:
    """Steps of one model, as a script would take them: with the loss read every step."""

    def __init__(self, name: str) -> None:
        import torch

        self.torch = torch
        torch.manual_seed(0)
        self.model, self.loss = build(name, torch)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def step(self, batch: int) -> None:
        loss = self.loss(batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        loss.item()

    def peak(self, batch: int, steps: int = 5) -> dict[str, Any]:
        """The memory that some steps take, as a fresh process would."""
        cuda = self.torch.cuda
        self.optimizer.zero_grad(set_to_none=True)
        cuda.synchronize()
        cuda.empty_cache()
        cuda.reset_peak_memory_stats()
        for _ in range(steps):
            self.step(batch)
        free, total = cuda.mem_get_info()
        return {
            "batch": batch,
            "reserved": cuda.max_memory_reserved(),
            "allocated": cuda.max_memory_allocated(),
            "beside": total - free - cuda.memory_reserved(),
        }

    def solo(self, batch: int) -> dict[str, Any]:
        """Step time alone, and the part of it that kernels run."""
        for _ in range(WARMUP):
            self.step(batch)
        start, steps = time.perf_counter(), 0
        while time.perf_counter() - start < SOLO_S:
            self.step(batch)
            steps += 1
        step_s = (time.perf_counter() - start) / steps
        activities = [self.torch.profiler.ProfilerActivity.CUDA]
        with self.torch.profiler.profile(activities=activities) as recorded:
            for _ in range(10):
                self.step(batch)
        kernels_s = sum(event.device_time_total for event in recorded.key_averages()) / 1e6 / 10
        return {"step_s": step_s, "busy_kernels": min(1.0, kernels_s / step_s), "ended_at": time.time()}


def child(arguments: list[str]) -> None:
    """`memory MODEL LIMIT`, `solo MODEL BATCH` or `pair MODEL BATCH READY GO`; prints JSON."""
    what, name = arguments[:2]
    trainer = Trainer(name)
    if what == "memory":
        limit = float(arguments[2])
        trainer.step(SMALL[name][0])  # optimizer state and workspaces are there from the first measurement on
        rows = [trainer.peak(batch) for batch in SMALL[name]]
        sizes = [SMALL[name][0] * n for n in range(1, SPAN * SMALL[name][-1] // SMALL[name][0] + 1)]
        from_small = near_line([row["batch"] for row in rows], [row["reserved"] for row in rows], sizes[-1])
        while True:
            xs, ys = [row["batch"] for row in rows], [row["reserved"] for row in rows]
            size = next_size(xs, ys, limit - rows[0]["beside"], sizes, margin=0.05)
            if size is None:
                break
            line = near_line(xs, ys, size)
            rows.append({**trainer.peak(size), "predicted": line.at(size), "error_bar": line.error(size)})
            rows[-1]["off"] = rows[-1]["predicted"] / rows[-1]["reserved"] - 1
        found = rows[-1]
        if found["batch"] <= SMALL[name][-1]:
            raise SystemExit(f"nothing larger than {SMALL[name][-1]} fits: give a larger `--limit-gib`")
        # Once near the limit, sizes hardly differ: what counts is the first that came as far as half of it.
        first = next(row for row in rows if row["batch"] >= 0.5 * found["batch"])
        result: dict[str, Any] = {
            "model": name,
            "sizes": rows,
            "largest": found,
            "judged_at": first["batch"],
            "off": first["off"],
            "off_from_small": from_small.at(first["batch"]) / first["reserved"] - 1,
            "fits": found["reserved"] + found["beside"] <= limit,
        }
    elif what == "solo":
        began_at = time.time()
        result = {"model": name, **trainer.solo(int(arguments[2]))}
        result["began_at"] = began_at
    else:
        batch = int(arguments[2])
        for _ in range(WARMUP):
            trainer.step(batch)
        print("ready", flush=True)
        sys.stdin.readline()  # until both are
        moments = [time.time()]
        while moments[-1] - moments[0] < PAIR_S:
            trainer.step(batch)
            moments.append(time.time())
        result = {"model": name, "moments": moments}
    print(json.dumps(result))


def start(*arguments: str) -> "subprocess.Popen[str]":
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    command = [sys.executable, "-m", "benchmarks.gpu.fleet", "--child", *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)


def result_of(process: "subprocess.Popen[str]") -> dict[str, Any]:
    out, _ = process.communicate(timeout=LIMIT_S)
    if process.returncode:
        raise SystemExit(f"{process.args!r} ended with exit code {process.returncode}")
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


class Watch:
    """How busy the GPU is, as its driver says, several times a second; nothing without `nvidia-smi`."""

    def __init__(self) -> None:
        command = ["nvidia-smi", "--query-gpu=utilization.gpu,utilization.memory"]
        command += ["--format=csv,noheader,nounits", "-lms", "100", "-i", "0"]
        self.process = None
        self.rows: list[tuple[float, float, float]] = []
        try:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        except OSError:
            return
        import threading

        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in (self.process and self.process.stdout) or ():
            try:
                busy, memory = (float(part) / 100 for part in line.split(","))
            except ValueError:
                continue
            self.rows.append((time.time(), busy, memory))

    def between(self, start: float, end: float) -> tuple[float, float] | None:
        inside = [row for row in self.rows if start <= row[0] <= end]
        if not inside:
            return None
        return sum(r[1] for r in inside) / len(inside), sum(r[2] for r in inside) / len(inside)

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


def measure_solo(watch: Watch) -> dict[str, dict[str, Any]]:
    found = {}
    for name in sorted({name for pair in PAIRS for name in pair}):
        row = result_of(start("solo", name, str(PAIR_SIZES[name])))
        # The timed part, less its ends: the driver reports with a delay.
        seen = watch.between(row["began_at"] + 1.0, row["began_at"] + SOLO_S)
        row["busy_driver"], row["bandwidth_driver"] = seen if seen else (None, None)
        found[name] = row
        say(str({key: round(v, 4) if isinstance(v, float) else v for key, v in row.items()}))
    return found


def share_fairly(a: float, b: float) -> tuple[float, float]:
    """The other model: both get what they need, or the one that needs less does and the other the rest."""
    if a + b <= 1:
        return 1.0, 1.0
    part_a = min(a, max(0.5, 1 - b))
    part_b = min(b, 1 - part_a)
    return part_a / max(a, 1e-9), part_b / max(b, 1e-9)


def measure_pair(names: tuple[str, str], solo: dict[str, dict[str, Any]]) -> dict[str, Any]:
    processes = [start("pair", name, str(PAIR_SIZES[name])) for name in names]
    for process in processes:
        assert process.stdout is not None
        process.stdout.readline()  # `ready`, or the end
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    both = [result_of(process)["moments"] for process in processes]
    begin, end = max(m[0] for m in both) + 0.3, min(m[-1] for m in both)  # while both ran
    speeds = []
    for moments in both:
        inside = [moment for moment in moments if begin <= moment <= end]
        speeds.append((len(inside) - 1) / (inside[-1] - inside[0]))
    factors = [speed * solo[name]["step_s"] for speed, name in zip(speeds, names, strict=True)]
    row: dict[str, Any] = {"pair": names, "measured": factors}
    for source in ("driver", "kernels"):
        busy = [solo[name][f"busy_{source}"] for name in names]
        if None in busy:
            continue
        row[f"busy_{source}"] = busy
        for model, guess in (
            ("turns", predict(Load(busy[0]), Load(busy[1]))),
            ("fair", share_fairly(busy[0], busy[1])),
        ):
            row[f"{model}_{source}"] = guess
            row[f"{model}_{source}_off"] = [g / f - 1 for g, f in zip(guess, factors, strict=True)]
    return row


def fleet(
    limit_gib: Annotated[float, typer.Option(min=1, help="The memory that a model may take.")] = 60.0,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Set memory and the speeds of packed jobs on a GPU against what profiles predict. Needs a GPU."""
    check_output(output)
    import torch

    device = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    report: dict[str, Any] = {**device, "limit_gib": limit_gib, "memory": [], "pairs": []}
    began = time.monotonic()
    for name in SMALL:
        row = result_of(start("memory", name, str(limit_gib * 2**30)))
        report["memory"].append(row)
        say(f"{name} {row['largest']} off {row['off']:+.1%}, fits {row['fits']}")
    watch = Watch()
    try:
        report["alone"] = solo = measure_solo(watch)
    finally:
        watch.close()
    for pair in PAIRS:
        row = measure_pair(pair, solo)
        report["pairs"].append(row)
        say(json.dumps(row))
    report["worst_memory_off"] = max(abs(row["off"]) for row in report["memory"])
    for key in ("turns_driver", "turns_kernels", "fair_driver", "fair_kernels"):
        offs = [abs(off) for row in report["pairs"] for off in row.get(f"{key}_off", ())]
        report[f"worst_{key}_off"] = max(offs, default=None)
    report["seconds"] = time.monotonic() - began
    deliver(report, output, as_json)
    if not as_json:
        for key, value in report.items():
            if key.startswith("worst") or key == "seconds":
                typer.echo(f"{key}: {value}")


main = Command(fleet, "benchmarks.gpu.fleet", examples=("--limit-gib 20", "--json --output gpu_fleet.json"))

if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2:])
    else:
        main()
