"""Parts coded where they lie give the run that parts coded on the host give, bit for bit.

The CPU stands for a GPU here, with a codec that does on tensors what `Dct` does on vectors;
that the kernels do the same is for `tests/kernels`.
"""

import importlib
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from shoestring.checkpoint.snapshot import step_folder
from shoestring.codec.base import Layout
from shoestring.codec.dct import Dct
from shoestring.codec.feedback import Feedback
from shoestring.codec.registry import make
from shoestring.worker.replica import device
from shoestring.worker.replica.device import GpuCodecs, common_device
from shoestring.worker.rounds.policy import EveryStep, LocalSteps
from shoestring.worker.session import Session
from shoestring.worker.wrap import join
from tests.unit.worker.cluster import Cluster
from tests.unit.worker.masters import live_tensors, new_bytes

CPU = torch.device("cpu")
STEPS = 6
_seeding = threading.Lock()  # workers are threads here, and torch has one seed for all


class TensorDct:
    """`Dct` for tensors."""

    def __init__(self, **options: Any) -> None:
        self._codec = Dct(**options)
        self.spec = self._codec.spec

    def encode(self, values: Tensor, layout: Layout, kept: Tensor) -> Tensor:
        return torch.from_numpy(self._codec.encode(values.numpy(), layout, kept.numpy()))

    def decode(self, payload: Any, layout: Layout, out: Tensor, weight: float | None = None) -> None:
        self._codec.decode(np.asarray(payload), layout, out.numpy(), weight)


@pytest.fixture
def cpu_counts_as_a_gpu(monkeypatch):
    feedback = importlib.import_module("shoestring.codec.dct.gpu.feedback").GpuFeedback
    monkeypatch.setattr(device, "_gpu", lambda: SimpleNamespace(GpuDct=TensorDct, GpuFeedback=feedback))
    monkeypatch.setattr(device, "KINDS", ("cpu",))


def build(dtype: torch.dtype = torch.float32) -> nn.Module:
    with _seeding:
        torch.manual_seed(5)
        net = nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 300), nn.Linear(300, 6)
        )
    net[0].weight.data = net[0].weight.data.to(memory_format=torch.channels_last)
    return net.to(dtype)


def be_worker(
    here: Session,
    codec: str,
    policy: Any,
    *,
    on_host: bool = False,
    bad: int = 0,
    dtype: torch.dtype = torch.float32,
    steps: int = STEPS,
):
    """Train; return the hash after each step, and the coder."""
    model = build(dtype)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    model, optimizer = join(here, model, optimizer, codec=codec, policy=policy)
    driver, hashes = optimizer.driver, []
    if on_host:
        driver.coder._gpu.find = lambda codec, device: None
    for step in range(optimizer.steps + 1, steps + 1):
        source = torch.Generator().manual_seed(100 * step + here.run.worker)
        x, y = torch.randn(4, 1, 6, 6, generator=source), torch.randint(0, 6, (4,), generator=source)
        loss = nn.functional.cross_entropy(model(x.to(dtype)).float(), y)
        loss = loss * torch.nan if step == bad and here.run.worker == 1 else loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        hashes.append(optimizer.parameter_hash())
    return hashes, driver.coder


def kept_of(results: list[Any]) -> list[bytes]:
    return [values.tobytes() for _, coder in results for values in coder.state().values()]


POLICIES = {
    "every step": EveryStep(warmup=1),
    "delayed": EveryStep(delay=1),
    "local steps": LocalSteps(2),
    "outer momentum": LocalSteps(3, outer="nesterov"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_a_run_is_the_same_wherever_its_parts_are_coded(cpu_counts_as_a_gpu, policy, dtype):
    """On devices, on hosts, and on one of each."""
    runs = []
    for hosts in ((), (0, 1), (1,)):

        def work(here: Session, hosts: tuple[int, ...] = hosts) -> Any:
            return be_worker(here, "dct", policy, on_host=here.run.worker in hosts, dtype=dtype)

        with Cluster(2, 2) as cluster:
            runs.append(cluster.train(work))
    there, here, mixed = runs
    assert all(feedback.device == CPU for _, coder in there for feedback in coder._feedback)
    assert all(isinstance(feedback, Feedback) for _, coder in here for feedback in coder._feedback)
    for other in (here, mixed):
        assert [hashes for hashes, _ in other] == [hashes for hashes, _ in there]
        assert kept_of(other) == kept_of(there)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("policy", [EveryStep(), LocalSteps(2)], ids=["every step", "local steps"])
def test_what_is_not_compressed_is_the_same_too(cpu_counts_as_a_gpu, monkeypatch, policy, dtype):
    runs = []
    for kinds in (("cpu",), ()):
        monkeypatch.setattr(device, "KINDS", kinds)
        with Cluster(2, 1) as cluster:
            runs.append(
                [
                    hashes
                    for hashes, _ in cluster.train(
                        lambda here: be_worker(here, "float32", policy, dtype=dtype)
                    )
                ]
            )
    assert runs[0] == runs[1]
    assert runs[0][0][1::2] == runs[0][1][1::2]


def test_what_is_kept_follows_when_the_codec_changes(cpu_counts_as_a_gpu):
    """`dct`, then lossless, then `dct` again, with other weights: as on the host."""

    def work(here: Session, on_host: bool) -> Any:
        model = build()
        model, optimizer = join(
            here, model, torch.optim.SGD(model.parameters(), 0.05), codec="dct", policy=EveryStep()
        )
        driver, hashes, forms = optimizer.driver, [], []
        if on_host:
            driver.coder._gpu.find = lambda codec, device: None
        settings = [driver.pilot._fixed, driver.pilot._fixed, type(driver.pilot._fixed)()]
        for step in range(STEPS):
            driver.pilot._fixed = settings[step % 3]
            driver._sharing.weigh = lambda step=step: 1.0 + step
            source = torch.Generator().manual_seed(step)
            loss = model(torch.randn(4, 1, 6, 6, generator=source)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            hashes.append(optimizer.parameter_hash())
            forms.append(type(driver.coder._feedback[0]).__name__)
        return hashes, forms

    results = []
    for on_host in (False, True):
        with Cluster(1, 1) as cluster:
            results += cluster.train(lambda here, on_host=on_host: work(here, on_host))
    (there, forms), (here, _) = results
    assert there == here
    assert forms == ["GpuFeedback", "GpuFeedback", "NoneType"] * 2


def test_a_gradient_that_is_not_finite_is_skipped_and_keeps_what_was_kept(cpu_counts_as_a_gpu, capsys):
    with Cluster(2, 1) as cluster:
        results = cluster.train(lambda here: be_worker(here, "dct", EveryStep(), bad=3))
    assert results[0][0] == results[1][0]
    for _, coder in results:
        assert all(np.isfinite(values).all() for values in coder.state().values())
    assert "worker 1: step skipped at round 3" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("moves", [False, True], ids=["on the device", "from device to host"])
def test_a_resumed_run_ends_with_the_same_bits(cpu_counts_as_a_gpu, tmp_path: Path, moves, dtype):
    with Cluster(2, 1) as cluster:
        want = cluster.train(lambda here: be_worker(here, "dct", EveryStep(), dtype=dtype))
    with Cluster(2, 1, checkpoint=tmp_path, every=3) as cluster:
        cluster.train(lambda here: be_worker(here, "dct", EveryStep(), dtype=dtype, steps=3))
    with Cluster(2, 1, resume=step_folder(tmp_path, 3)) as cluster:
        got = cluster.train(lambda here: be_worker(here, "dct", EveryStep(), on_host=moves, dtype=dtype))
    assert [hashes for hashes, _ in got] == [hashes[3:] for hashes, _ in want]
    assert kept_of(got) == kept_of(want)


def test_a_worker_has_no_tensors_but_parameters_gradients_and_feedback(cpu_counts_as_a_gpu):
    before = live_tensors()

    def be_worker(here: Session) -> int:
        model = nn.Sequential(nn.Linear(300, 900), nn.Tanh(), nn.Linear(900, 300)).bfloat16()
        adamw = torch.optim.AdamW(model.parameters(), 1e-3)
        model, optimizer = join(here, model, adamw, codec="dct", policy="every")
        for _ in range(3):
            model(torch.ones(1, 300, dtype=torch.bfloat16)).square().mean().backward()
            optimizer.step()
        values = sum(parameter.numel() for parameter in model.parameters())
        used = new_bytes(before)
        needed = (2 + 2 + 4) * values
        assert not adamw.state
        assert needed <= used <= 1.1 * needed
        return values

    with Cluster(1, 1) as cluster:
        assert cluster.train(be_worker)[0] > 500_000


def test_only_dct_on_one_device_is_coded_there(cpu_counts_as_a_gpu, monkeypatch):
    said: list[str] = []
    codecs = GpuCodecs([], said.append)
    found = codecs.find(make("dct:small=16"), CPU)
    assert found is not None
    assert found.spec == "dct:small=16"
    assert codecs.find(Dct(small=16), CPU) is found
    assert codecs.find(make("float32"), CPU) is None
    assert codecs.find(make("dct"), None) is None
    assert common_device([torch.zeros(1), torch.zeros(1, device="meta")]) is None
    monkeypatch.setattr(device, "KINDS", ("cuda",))
    assert common_device([torch.zeros(1)]) is None
    assert not said


@pytest.mark.parametrize(
    "problem", [ImportError("No module named 'triton'"), RuntimeError("sm_50 is not supported")]
)
def test_why_the_host_codes_instead_is_said_once(monkeypatch, problem):
    def fail() -> None:
        raise problem

    said: list[str] = []
    monkeypatch.setattr(device, "_gpu", fail)
    codecs = GpuCodecs([], said.append)
    assert codecs.find(make("dct:small=16"), CPU) is None
    assert codecs.find(make("dct"), CPU) is None
    [text] = said
    assert "`cpu`" in text
    assert str(problem) in text


def test_a_device_whose_bits_differ_is_not_used(cpu_counts_as_a_gpu, monkeypatch):
    class OffByOne(TensorDct):
        def decode(self, *arguments: Any) -> None:
            super().decode(*arguments)
            arguments[2][7] += 2.0**-20

    said: list[str] = []
    gpu = device._gpu()
    monkeypatch.setattr(device, "_gpu", lambda: SimpleNamespace(GpuDct=OffByOne, GpuFeedback=gpu.GpuFeedback))
    assert GpuCodecs([], said.append).find(make("dct"), CPU) is None
    assert "differ" in said[0]
