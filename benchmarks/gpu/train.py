"""`python -m benchmarks.gpu.train`: train with several workers on one GPU.

First the equality, on a small model: replicas on a GPU hold the same bits after every round,
also beside one on a CPU, after a gradient that is not finite and after a resume; and with each
push, what is sent and what is kept is what came in. Then a transformer of 101 million
parameters on Python source, two workers on the GPU and two shards on the host's CPU; a worker
and a shard are one emulated host, and what goes from one to the other crosses a link of
1 Gbit/s each way. Seconds a step, codec time, bytes on the wire and over PCIe (as the CUDA
profiler counts them), and the time a step waits for the exchange.
"""

import json
import os
import shutil
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.command import Command, say
from shoestring.bench.link.slowlink import Line
from shoestring.checkpoint.snapshot import step_folder
from shoestring.cli.bench.options import AsJson, Output, check_output, deliver
from shoestring.config import Run
from shoestring.errors import UsageError
from shoestring.launch.local import run_local
from shoestring.server.warmup import warm_up

RATE_MBIT_S = 1000.0
WIDTH, LAYERS, HEADS, CONTEXT, BATCH = 1024, 8, 16, 256, 32
CHECKS: list[dict[str, Any]] = [
    {"codec": "dct", "policy": "every"},
    {"codec": "dct:bits=0.5", "policy": "every:delay=1"},
    {"codec": "dct", "policy": "local:2"},
    {"codec": "float32", "policy": "every"},
    {"codec": "dct", "policy": "every", "host": 1},
    {"codec": "dct", "policy": "local:2", "host": 1},
    {"codec": "dct", "policy": "every", "bad": 3},
]
ROWS: list[dict[str, Any]] = [
    {"codec": "float32", "policy": "every", "steps": 9},
    {"codec": "dct", "policy": "every", "steps": 40},
    {"codec": "dct", "policy": "every", "steps": 12, "coded_on": "host"},
    {"codec": "float32", "policy": "local:8", "steps": 32},
    {"codec": "dct", "policy": "local:8", "steps": 48},
]
CHUNK_BYTES, BURST_S = 1 << 16, 5e-3
FIRST = 3  # rounds that are not timed


# What every worker runs.


def small_net(torch: Any) -> Any:
    nn = torch.nn
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(576, 900), nn.ReLU(),
        nn.Linear(900, 10),
    )  # fmt: skip


def be_checked(settings: dict[str, Any], folder: Path) -> None:
    """Train a little; write the hash after each round, and hold each push to the identity."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # which makes its results repeatable
    import torch

    import shoestring

    torch.use_deterministic_algorithms(True)
    world = shoestring.init()
    device = "cpu" if world.worker >= 2 - settings.get("host", 0) else "cuda"
    pushes = watch_identity() if device == "cuda" and settings["codec"] != "float32" else [0]
    model = small_net(torch).to(device)
    adam = torch.optim.AdamW(model.parameters(), 1e-3)
    model, optimizer = shoestring.wrap(model, adam)
    driver, hashes, losses = optimizer.driver, {}, []
    while optimizer.steps < settings["steps"]:
        step, rounds = optimizer.steps + 1, driver.rounds
        source = torch.Generator().manual_seed(10 * step + world.worker)
        x, y = torch.randn(16, 1, 8, 8, generator=source), torch.randint(0, 10, (16,), generator=source)
        loss: Any = torch.nn.functional.cross_entropy(model(x.to(device)), y.to(device))
        if step == settings.get("bad") and world.worker == 1:
            loss = loss * torch.nan
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if driver.rounds != rounds:
            hashes[driver.rounds] = optimizer.parameter_hash()
    kept = [values for name, values in driver.coder.state().items() if name.startswith("kept")]
    assert all(np.isfinite(values).all() for values in kept)
    write(folder, world.worker, {"hashes": hashes, "losses": losses, "pushes": pushes[0]})


def watch_identity() -> list[int]:
    """Check every push on a GPU; returns the count, which goes on."""
    from shoestring.codec.dct import Dct
    from shoestring.codec.dct.gpu import GpuFeedback

    count, encode = [0], GpuFeedback.encode_total

    def checked(self: Any, codec: Any, came_in: Any) -> Any:
        before = came_in.cpu().numpy()
        payload = encode(self, codec, came_in)
        sent, kept = np.empty(self.layout.total, np.float32), self.kept
        Dct().decode(payload, self.layout, sent)
        assert (sent + kept == sent.astype(np.float64) + kept).all(), "a sum was rounded"
        assert np.abs(sent + kept - before).max() <= np.abs(before).max() * 2.0**-16, "something was lost"
        count[0] += 1
        return payload

    watched: Any = GpuFeedback
    watched.encode_total = checked
    return count


def be_timed(settings: dict[str, Any], folder: Path) -> None:
    """Train the transformer; write times, bytes and losses."""
    import torch

    import shoestring
    from shoestring.bench.codec.training import Transformer
    from shoestring.bench.data import load_text
    from shoestring.worker.replica import device as devices
    from shoestring.worker.coder import PartCoder

    if settings.get("coded_on") == "host":
        without: Any = devices
        without.KINDS = ()
    spent = {"encode": Spent(PartCoder, "_encode"), "decode": Spent(PartCoder, "_add")}
    world = shoestring.init()
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = True
    model = Transformer(WIDTH, LAYERS, HEADS, CONTEXT).cuda()
    values = sum(p.numel() for p in model.parameters())
    model, optimizer = shoestring.wrap(model, torch.optim.AdamW(model.parameters(), 3e-4))
    text = torch.from_numpy(load_text().astype(np.int64)).cuda()
    window = torch.arange(CONTEXT + 1, device="cuda")
    source = torch.Generator().manual_seed(1 + world.worker)
    driver, traffic = optimizer.driver, optimizer.traffic
    losses: list[float] = []
    steps: list[tuple[float, float]] = []  # compute, and `optimizer.step`

    def step() -> None:
        torch.cuda.synchronize()
        began = time.perf_counter()
        starts = torch.randint(len(text) - CONTEXT, (BATCH, 1), generator=source).cuda()
        pieces = text[starts + window]
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(pieces[:, :-1])
            logits = logits.flatten(0, 1).float()
            loss: Any = torch.nn.functional.cross_entropy(logits, pieces[:, 1:].flatten())
        loss.backward()
        torch.cuda.synchronize()
        middle = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        steps.append((middle - began, time.perf_counter() - middle))
        losses.append(loss.item())

    def steps_a_round() -> int:
        return 8 if "local" in settings["policy"] else 1

    while driver.rounds < FIRST:
        step()
    steps.clear()
    for watch in spent.values():
        watch.clear()
    up, down, rounds, began = traffic.up, traffic.down, driver.rounds, time.perf_counter()
    while optimizer.steps < settings["steps"]:
        step()
    seconds, rounds = time.perf_counter() - began, driver.rounds - rounds
    times = {name: watch.seconds / rounds for name, watch in spent.items()}
    up, down = traffic.up - up, traffic.down - down
    count, timed = len(steps), list(steps)
    steps.clear()

    def whole_round() -> None:
        for _ in range(steps_a_round()):
            step()

    crossed = pcie_bytes(whole_round, folder / f"{world.worker}.trace")
    write(
        folder,
        world.worker,
        {
            "values": values,
            "steps": count,
            "rounds": rounds,
            "seconds_a_step": seconds / count,
            "compute_s": statistics.median(a for a, _ in timed),
            "exposed_s": exposed(timed, rounds),
            "encode_s": times["encode"],
            "decode_s": times["decode"],
            "up_bytes": up / rounds,
            "down_bytes": down / rounds,
            "to_host_bytes": crossed["DtoH"],
            "to_device_bytes": crossed["HtoD"],
            "losses": losses,
            "hash": optimizer.parameter_hash(),
        },
    )


def exposed(steps: list[tuple[float, float]], rounds: int) -> float:
    """Seconds a round that `optimizer.step` takes beyond what it takes without one."""
    by_time = sorted(after for _, after in steps)
    local = by_time[: len(steps) - rounds]
    return statistics.fmean(by_time[len(steps) - rounds :]) - (statistics.median(local) if local else 0.0)


class Spent:
    """Adds up the seconds that a method takes."""

    def __init__(self, owner: Any, name: str) -> None:
        self.seconds = 0.0
        method = getattr(owner, name)

        def timed(*arguments: Any) -> Any:
            began = time.perf_counter()
            try:
                return method(*arguments)
            finally:
                self.seconds += time.perf_counter() - began

        setattr(owner, name, timed)

    def clear(self) -> None:
        self.seconds = 0.0


def pcie_bytes(call: Callable[[], Any], trace: Path) -> dict[str, int]:
    """The bytes that copies between host and device move during a call, each way."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
        call()
        torch.cuda.synchronize()
    recorded.export_chrome_trace(str(trace))
    events = json.loads(trace.read_text())["traceEvents"]
    trace.unlink()
    crossed = {"HtoD": 0, "DtoH": 0}
    for event in events:
        for way in crossed:
            if event.get("cat") == "gpu_memcpy" and way in event["name"]:
                crossed[way] += int(event["args"]["bytes"])
    return crossed


def write(folder: Path, worker: int, result: dict[str, Any]) -> None:
    (folder / f"worker-{worker}.json").write_text(json.dumps(result))


# What starts them.


class Link:
    """A full-duplex link between two hosts: a thread for each way of each connection.

    `SlowLink` does the same in one thread, which cannot carry a gigabit a second both ways.
    """

    def __init__(self, rate_mbit_s: float) -> None:
        self._ways = [(Line(rate_mbit_s), threading.Lock()) for _ in range(2)]
        self._open: list[socket.socket] = []

    def __enter__(self) -> "Link":
        return self

    def __exit__(self, *_: object) -> None:
        for end in self._open:
            end.close()

    def toward_right(self, address: str) -> str:
        return self._listen(address, 0)

    def toward_left(self, address: str) -> str:
        return self._listen(address, 1)

    def _listen(self, address: str, way: int) -> str:
        listener = socket.create_server(("127.0.0.1", 0))
        self._open.append(listener)
        host, _, port = address.removeprefix("tcp://").rpartition(":")

        def accept() -> None:
            while True:
                try:
                    near, _ = listener.accept()
                except OSError:
                    return
                far = socket.create_connection((host, int(port)))
                self._open += [near, far]
                for source, sink, own in ((near, far, way), (far, near, 1 - way)):
                    threading.Thread(target=self._pump, args=(source, sink, own), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        return f"tcp://127.0.0.1:{listener.getsockname()[1]}"

    def _pump(self, source: socket.socket, sink: socket.socket, way: int) -> None:
        memory = memoryview(bytearray(CHUNK_BYTES))
        sink.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        line, lock = self._ways[way]
        try:
            while size := source.recv_into(memory):
                with lock:
                    # A little earlier than now: the line did not stand still while this thread woke up.
                    leaves_s = line.depart(time.monotonic() - BURST_S, size)
                # The line itself: the chunk is on it until then.
                time.sleep(max(0.0, leaves_s - time.monotonic()))
                sink.sendall(memory[:size])
            sink.shutdown(socket.SHUT_WR)
        except OSError:  # one end has closed
            return


def start(settings: dict[str, Any], link: Link | None, **run: Any) -> list[dict[str, Any]]:
    """Run two workers and two shards; return what the workers wrote."""

    def reach(worker: int, addresses: Sequence[str]) -> tuple[str, ...]:
        left, right = addresses
        if link is None:
            return (left, right)
        return (left, link.toward_right(right)) if worker == 0 else (link.toward_left(left), right)

    folder = Path(tempfile.mkdtemp(prefix="gpu-train-"))
    try:
        outcome = run_local(
            ["-m", "benchmarks.gpu.train", "--work", json.dumps(settings), str(folder)],
            Run("gpu", workers=2, folder=folder, codec=settings["codec"], policy=settings["policy"], **run),
            shards=2,
            reach=reach,
        )
        if outcome.failure is not None:
            raise SystemExit(f"{outcome.failure.who} ended with exit code {outcome.failure.code}: {settings}")
        return [json.loads((folder / f"worker-{worker}.json").read_text()) for worker in range(2)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def check() -> list[dict[str, Any]]:
    """Small runs whose replicas must be equal after every round; raise where they are not."""
    rows = []
    for case in CHECKS:
        settings = {"work": "check", "steps": 8, **case}
        results = start(settings, None)
        assert results[0]["hashes"] == results[1]["hashes"], f"replicas differ: {case}"
        assert len(set(results[0]["hashes"].values())) >= len(results[0]["hashes"]) - 1
        assert settings["codec"] == "float32" or results[0]["pushes"], f"nothing was coded on the GPU: {case}"
        rows.append({**case, "rounds": len(results[0]["hashes"]), "pushes": [r["pushes"] for r in results]})
        say(f"equal {rows[-1]}")
    return [*rows, check_resume()]


def check_resume() -> dict[str, Any]:
    """A run that is resumed half way ends with the same bits."""
    settings = {"work": "check", "steps": 8, "codec": "dct", "policy": "every"}
    root = Path(tempfile.mkdtemp(prefix="gpu-train-"))
    try:
        whole = start(settings, None, checkpoint=root, every=4)
        resumed = start(settings, None, resume=step_folder(root, 4))
    finally:
        shutil.rmtree(root, ignore_errors=True)
    assert resumed[0]["hashes"] == resumed[1]["hashes"], "replicas differ after a resume"
    last = {round_: value for round_, value in whole[0]["hashes"].items() if int(round_) > 4}
    assert resumed[0]["hashes"] == last, "a resumed run went another way"
    row = {"resumed_at": 4, "rounds": len(last)}
    say(f"equal {row}")
    return row


def measure_link(rate_mbit_s: float, size_bytes: int = 1 << 28) -> list[float]:
    """Send as much both ways at once; return the Mbit/s each way that came through."""
    rates = [0.0, 0.0]
    with Link(rate_mbit_s) as link, socket.create_server(("127.0.0.1", 0)) as server:
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        host, _, port = link.toward_right(address).removeprefix("tcp://").rpartition(":")
        near = socket.create_connection((host, int(port)))
        far, _ = server.accept()

        def receive(way: int, end: socket.socket) -> None:
            began, got, memory = time.perf_counter(), 0, bytearray(1 << 18)
            while got < size_bytes:
                got += end.recv_into(memory)
            rates[way] = 8e-6 * got / (time.perf_counter() - began)

        threads = [threading.Thread(target=receive, args=pair) for pair in enumerate((far, near))]
        threads += [threading.Thread(target=end.sendall, args=(bytes(size_bytes),)) for end in (near, far)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        near.close()
        far.close()
    return rates


def train(settings: dict[str, Any]) -> dict[str, Any]:
    with Link(RATE_MBIT_S) as link:
        results = start({"work": "train", **settings}, link)
    assert results[0]["hash"] == results[1]["hash"], f"replicas differ: {settings}"
    losses = [statistics.fmean(pair) for pair in zip(*(r["losses"] for r in results), strict=True)]
    assert statistics.fmean(losses[-3:]) < losses[0], "the loss did not fall"
    row: dict[str, Any] = {"coded_on": "gpu" if settings["codec"] != "float32" else None, **settings}
    for key, value in results[0].items():
        if isinstance(value, int | float):
            row[key] = statistics.fmean(r[key] for r in results)
    return {**row, "losses": losses, "replicas_equal": True}


def gpu_train(
    only: Annotated[
        str | None, typer.Option(metavar="check|train", help="Only the equality, or only the figures.")
    ] = None,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Check that replicas on a GPU are equal, then train a transformer with two workers. Needs a GPU."""
    check_output(output)
    if only not in (None, "check", "train"):
        raise UsageError(f"`--only {only}` is not known here", hint="check or train")
    import torch

    report: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    began = time.monotonic()
    warm_up()
    say(f"kernels of the CPU after {time.monotonic() - began:.0f} s")
    if only != "train":
        report["check"] = check()
        say(f"checked after {time.monotonic() - began:.0f} s")
    if only != "check":
        report |= {"rate_mbit_s": RATE_MBIT_S, "link_mbit_s": measure_link(RATE_MBIT_S), "rows": []}
        report |= {"model": [WIDTH, LAYERS, HEADS, CONTEXT], "batch": BATCH}
        say(str({key: report[key] for key in ("rate_mbit_s", "link_mbit_s")}))
        for settings in ROWS:
            row = train(settings)
            report["rows"].append(row)
            shown = {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items() if k != "losses"}
            say(f"{shown} {[round(loss, 2) for loss in row['losses'][::8]]}")
            deliver(report, output, as_json=False)
    deliver(report, output, as_json)


main = Command(gpu_train, "benchmarks.gpu.train", examples=("--only check", "--json --output gpu_train.json"))

if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        order = json.loads(sys.argv[2])
        (be_checked if order["work"] == "check" else be_timed)(order, Path(sys.argv[3]))
    else:
        main()
