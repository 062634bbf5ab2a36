"""Parameters in two bytes train as the plain algorithm does, whose masters are float32; bit for bit."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from shoestring.checkpoint.export import read_model, write_model
from shoestring.checkpoint.snapshot import Snapshot, step_folder
from shoestring.config import Run
from shoestring.errors import JoinError, ShoestringError, UsageError
from shoestring.observe.events import EventLog
from shoestring.worker.session import Session
from shoestring.worker.wrap import join
from tests.unit.worker.cluster import Cluster
from tests.unit.worker.masters import (
    MIXTURES,
    STEPS,
    WORKERS,
    Dtypes,
    build,
    every_step,
    live_tensors,
    local_steps,
    loss_of,
    new_bytes,
)

BFLOAT16 = MIXTURES["bfloat16"]


@pytest.fixture(scope="module", autouse=True)
def one_torch_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def alone() -> Session:
    return Session(Run(), "1", EventLog(None, "test"))


def train(here: Session, dtypes: Dtypes, codec: str, policy: str, steps: int = STEPS) -> list[str]:
    """The hash of the parameters after each step of a run."""
    model, optimizer = build(dtypes)
    if here.run.worker:  # only the first worker's parameters count
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(-1)
    model, optimizer = join(here, model, optimizer, codec=codec, policy=policy)
    digests = []
    for step in range(optimizer.steps + 1, steps + 1):
        loss_of(model, step, here.run.worker).backward()
        optimizer.step()
        optimizer.zero_grad()
        digests.append(optimizer.parameter_hash())
    return digests


CASES = {
    "every": lambda dtypes, codec: every_step(dtypes, codec),
    "every:delay=1": lambda dtypes, codec: every_step(dtypes, codec, 1),
    "local:2,keep=yes": lambda dtypes, codec: local_steps(dtypes, codec, 2),
}


@pytest.mark.parametrize("dtypes", MIXTURES.values(), ids=MIXTURES)
@pytest.mark.parametrize("codec", ["float32", "dct"])
@pytest.mark.parametrize("policy", CASES)
def test_workers_are_equal_and_do_what_the_plain_algorithm_does(policy, codec, dtypes):
    want = CASES[policy](dtypes, codec)
    for shards, ipc in ((1, True), (2, False)):
        with Cluster(WORKERS, shards, ipc=ipc) as cluster:
            results = cluster.train(lambda here: train(here, dtypes, codec, policy))
        for found in results:
            assert (found[1::2] if "local" in policy else found) == want, f"{shards} shards"
    assert len(set(want)) == STEPS // 2 if "local" in policy else STEPS - int(policy != "every")


@pytest.mark.parametrize("dtypes", MIXTURES.values(), ids=MIXTURES)
def test_the_master_stays_when_rounds_begin_to_be_compressed(dtypes):
    with Cluster(WORKERS, 2) as cluster:
        results = cluster.train(lambda here: train(here, dtypes, "dct", "every:warmup=5"))
    assert results == [every_step(dtypes, "dct", warmup=5)] * WORKERS


@pytest.mark.parametrize("codec", ["float32", "dct"])
@pytest.mark.parametrize("policy", ["bounded:2", "async"])
def test_workers_that_do_not_wait_for_each_other_learn(policy, codec):
    def be_worker(here: Session) -> tuple[float, float]:
        model, _ = build(BFLOAT16)
        sgd = torch.optim.SGD(model.parameters(), 0.05)
        model, optimizer = join(here, model, sgd, codec=codec, policy=policy)
        losses = []
        for _ in range(24):
            loss = loss_of(model, 0, here.run.worker)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses[0], losses[-1]

    with Cluster(WORKERS, 2) as cluster:
        assert all(last < first for first, last in cluster.train(be_worker))


def test_a_worker_of_another_precision_is_refused_by_name():
    def be_worker(here: Session) -> None:
        model, optimizer = build(BFLOAT16 if here.run.worker else (torch.float32,))
        join(here, model, optimizer, codec="float32", policy="every")

    with (
        Cluster(2, 1, join_timeout_s=5.0) as cluster,
        pytest.raises(JoinError, match=r"`layers.0.weight` is (bfloat16|float32), others have"),
    ):
        cluster.train(be_worker)


@pytest.mark.parametrize("policy", ["every", "async", "local:2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_model_that_is_converted_after_it_was_wrapped_is_refused(policy, dtype):
    here = alone()
    model, inner = build((torch.float32,))
    model, optimizer = join(here, model, inner, codec="dct", policy=policy)
    loss_of(model, 0, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    model.to(dtype)
    loss_of(model, 1, 0).backward()
    with pytest.raises(
        UsageError, match=f"`layers.0.weight` is {dtype} now, and was torch.float32"
    ) as caught:
        optimizer.step()
    assert "before `wrap`" in caught.value.hint
    here.close()


# What it is for: no more memory than this, and no less accuracy than with a master on the worker.


@pytest.mark.parametrize("codec", ["float32", "dct"])
def test_a_worker_has_no_tensors_but_parameters_and_gradients(codec):
    before = live_tensors()
    here = alone()
    model = nn.Sequential(nn.Linear(300, 900), nn.Tanh(), nn.Linear(900, 300)).bfloat16()
    inner = torch.optim.AdamW(model.parameters(), 1e-3)
    model, optimizer = join(here, model, inner, codec=codec, policy="every")
    for _ in range(3):
        model(torch.ones(1, 300, dtype=torch.bfloat16)).square().mean().backward()
        optimizer.step()
    values = sum(parameter.numel() for parameter in model.parameters())
    parameters = gradients = 2 * values
    used = new_bytes(before)
    feedback = sum(kept.nbytes for name, kept in optimizer.driver.coder.state().items() if "kept" in name)
    here.close()
    assert feedback == (4 * values if codec == "dct" else 0)  # not in tensors, where parameters are on a CPU
    assert parameters + gradients <= used <= 1.1 * (parameters + gradients)
    assert not inner.state


def losses_of(model: nn.Module, step: Callable[[], object]) -> list[float]:
    losses = []
    for count in range(150):
        x = torch.randn(32, 24, generator=torch.Generator().manual_seed(count))
        loss = nn.functional.cross_entropy(model(x), (x[:, :6] * 3).argmax(1))
        loss.backward()
        step()
        losses.append(loss.item())
        for parameter in model.parameters():
            parameter.grad = None
    return losses


def shared_losses(dtypes: Dtypes, codec: str) -> list[float]:
    model, _ = build(dtypes)
    here = alone()
    adamw = torch.optim.AdamW(model.parameters(), RATE)
    model, optimizer = join(here, model, adamw, codec=codec, policy="every")
    losses = losses_of(model, optimizer.step)
    here.close()
    return losses


def losses_with_masters() -> list[float]:
    model, _ = build(BFLOAT16)
    masters = [parameter.detach().float() for parameter in model.parameters()]
    adamw = torch.optim.AdamW(masters, RATE)

    def step() -> None:
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad = parameter.grad.float() if parameter.grad is not None else None
        adamw.step()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)

    return losses_of(model, step)


RATE = 3e-4  # most updates are too small for two bytes


def test_the_loss_is_that_of_masters_on_the_worker():
    found, want = shared_losses(BFLOAT16, "float32"), losses_with_masters()
    # The update is torch's but for the order of its operations, so the masters differ in their last places,
    # and now and then a parameter is rounded the other way: far less than the batches' own noise.
    assert found[:5] == pytest.approx(want[:5], rel=1e-3)
    assert np.mean(found[-20:]) == pytest.approx(np.mean(want[-20:]), rel=0.01)
    model, _ = build(BFLOAT16)
    without = losses_of(model, torch.optim.AdamW(model.parameters(), RATE).step)
    assert np.mean(without[-20:]) > 1.1 * np.mean(found[-20:])


def test_compressed_the_loss_is_that_of_float32_parameters():
    found, want = shared_losses(BFLOAT16, "dct"), shared_losses((torch.float32,), "dct")
    assert np.mean(found[-20:]) == pytest.approx(np.mean(want[-20:]), rel=0.02)


# The optimizer's state.


@pytest.mark.parametrize("codec", ["float32", "dct"])
@pytest.mark.parametrize("dtypes", MIXTURES.values(), ids=MIXTURES)
def test_moments_are_float32_in_what_is_saved_and_in_what_is_loaded(tmp_path: Path, dtypes, codec):
    here = alone()
    model, inner = build(dtypes)
    model, optimizer = join(here, model, inner, codec=codec, policy="every")
    for step in range(5):
        (1e-2 * loss_of(model, step, 0)).backward()  # squares of this are too small for half precision
        optimizer.step()
        optimizer.zero_grad()
    torch.save([model.state_dict(), optimizer.state_dict()], tmp_path / "saved.pt")
    weights, state = torch.load(tmp_path / "saved.pt", weights_only=True)
    for entry in state["state"].values():
        assert entry["exp_avg"].dtype == entry["exp_avg_sq"].dtype == torch.float32
        assert float(entry["step"]) == 5
    optimizer.load_state_dict(optimizer.state_dict())  # as Accelerate does; nothing is set by it
    assert optimizer.driver.state.leave(6) is False
    here.close()

    here = alone()
    model, inner = build(dtypes)
    model.load_state_dict(weights)
    model, optimizer = join(here, model, inner, codec=codec, policy="every")
    optimizer.load_state_dict(state)
    assert same_moments(optimizer.state_dict(), state)
    loss_of(model, 5, 0).backward()
    optimizer.step()  # with which it goes to the shards
    found = optimizer.state_dict()
    here.close()
    # A step of plain AdamW on masters, from the same state.
    plain, _ = build(dtypes)
    plain.load_state_dict(weights)
    loss_of(plain, 5, 0).backward()
    masters = [parameter.detach().float() for parameter in plain.parameters()]
    for master, parameter in zip(masters, plain.parameters(), strict=True):
        master.grad = parameter.grad.float()
    adamw = torch.optim.AdamW(masters)
    adamw.load_state_dict(state)  # rates and all
    adamw.step()
    if codec == "float32":
        assert same_moments(found, adamw.state_dict(), rtol=1e-5, atol=1e-10)


def same_moments(own: dict[str, Any], want: dict[str, Any], **tolerance: float) -> bool:
    for index, entry in want["state"].items():
        for key, value in entry.items():
            torch.testing.assert_close(
                own["state"][index][key], value, **({"rtol": 0, "atol": 0} | tolerance)
            )
    return own["state"].keys() == want["state"].keys()


def test_a_state_that_plain_torch_made_in_two_bytes_goes_to_the_shards():
    model, inner = build(BFLOAT16)
    for step in range(3):
        loss_of(model, step, 0).backward()
        inner.step()
        inner.zero_grad()
    before = {index: dict(entry) for index, entry in inner.state_dict()["state"].items()}
    assert before[0]["exp_avg"].dtype == torch.bfloat16
    here = alone()
    model, optimizer = join(here, model, inner, codec="float32", policy="every")
    found = optimizer.state_dict()["state"]
    here.close()
    for index, entry in before.items():
        for key, value in entry.items():
            assert torch.equal(found[index][key].float(), value.float())


# Checkpoints.


class Whole(nn.Module):
    """Trained, frozen and counted: all of it in two bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.trained, _ = build(BFLOAT16)
        self.frozen = nn.Linear(24, 24, bias=False).requires_grad_(False)
        self.norm = nn.BatchNorm1d(24)
        self.register_buffer("codes", torch.arange(6).to(torch.float8_e4m3fn))
        self.frozen.bfloat16()
        self.norm.bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.trained(self.norm(self.frozen(x.bfloat16())))


def resume(here: Session, codec: str, policy: str, steps: int) -> tuple[str, dict[str, torch.Tensor]]:
    """The hash of the parameters after so many steps of a run, and all that the model holds then."""
    model = Whole()
    with torch.no_grad():  # what is not trained comes from the checkpoint
        model.frozen.weight.fill_(0.0 if here.run.resume is not None else 0.37)
    adamw = torch.optim.AdamW(model.parameters(), 0.01)
    model, optimizer = join(here, model, adamw, codec=codec, policy=policy)
    for step in range(optimizer.steps + 1, steps + 1):
        loss_of(model, step, here.run.worker).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer.parameter_hash(), {name: held.clone() for name, held in model.state_dict().items()}


def same(found: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> bool:
    return found.keys() == want.keys() and all(
        found[name].dtype == held.dtype and torch.equal(found[name].float(), held.float())
        for name, held in want.items()
    )


@pytest.mark.parametrize("codec", ["float32", "dct"])
@pytest.mark.parametrize(("policy", "every"), [("every", 4), ("every:delay=1", 4), ("local:2", 2)])
def test_a_resumed_run_ends_with_the_same_bits_which_are_exported(tmp_path: Path, policy, every, codec):
    def run(folder: Path, steps: int, shards: int, **settings: Any) -> list[Any]:
        with Cluster(WORKERS, shards, checkpoint=folder, every=every, **settings) as cluster:
            return cluster.train(lambda here: resume(here, codec, policy, steps))

    want = run(tmp_path / "whole", STEPS, 1)
    run(tmp_path / "cut", STEPS // 3, 1)
    first = step_folder(tmp_path / "cut", every)
    run(tmp_path / "cut again", 2 * STEPS // 3, 2, resume=first)
    second = step_folder(tmp_path / "cut again", 2 * every)
    found = run(tmp_path / "rest", STEPS, 1, resume=second)
    assert [digest for digest, _ in found] == [digest for digest, _ in want]
    assert all(same(own, other) for (_, own), (_, other) in zip(found, want, strict=True))
    output = tmp_path / "model.safetensors"
    write_model(read_model(Snapshot(step_folder(tmp_path / "rest", 3 * every))), output)
    assert same(load_file(output), want[0][1])


def test_a_checkpoint_of_another_precision_is_refused(tmp_path: Path):
    with Cluster(1, 1, checkpoint=tmp_path, every=4) as cluster:
        cluster.train(lambda here: train(here, BFLOAT16, "float32", "every", steps=4))
    for name in ("float16", "float32"):
        dtypes = (getattr(torch, name),)
        with (
            Cluster(1, 1, resume=step_folder(tmp_path, 4)) as cluster,
            pytest.raises(ShoestringError) as caught,
        ):
            cluster.train(lambda here, dtypes=dtypes: train(here, dtypes, "float32", "every"))
        assert "model" in caught.value.hint
