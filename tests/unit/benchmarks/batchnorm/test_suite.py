"""`python -m benchmarks.batchnorm`: the mathematics of what is computed in one process, and one tiny run."""

import json
import struct
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.batchnorm import cases, delay, runs
from benchmarks.batchnorm import suite as bench
from benchmarks.batchnorm.__main__ import main
from benchmarks.batchnorm.net import (
    JoinedNorm,
    LocalNorm,
    average,
    build_net,
    first_of,
    measure_accuracy,
    spread,
)
from benchmarks.batchnorm.training import Result, Tally, Task
from shoestring.bench.data import Images
from shoestring.bench.link.slowlink import SlowLink
from shoestring.errors import ShoestringError, UsageError

WORKERS, BATCH = 3, 2
# In float64 sums in another order differ by some 1e-15 of their terms; far from what is looked for.
close = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-12)


@pytest.fixture(autouse=True)
def doubles():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def plain():
    """A net whose norms' weights are not all alike."""
    torch.manual_seed(1)
    net = build_net()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.bias, -0.5, 0.5)
    return net


def batch():
    source = torch.Generator().manual_seed(2)
    x = torch.randn(WORKERS, BATCH, 1, 28, 28, generator=source)
    return x, torch.randint(10, (WORKERS, BATCH), generator=source)


def copy_of(net):
    made = build_net()
    made.load_state_dict(net.state_dict())
    return made


def gradients(net, x, y):
    net.zero_grad()
    nn.functional.cross_entropy(net(x), y).backward()
    return [parameter.grad.clone() for parameter in net.parameters()]


def test_local_is_the_mean_of_workers_with_plain_batchnorm(plain):
    x, y = batch()
    nets = [copy_of(plain) for _ in range(WORKERS)]
    each = [gradients(net, *own) for net, *own in zip(nets, x, y, strict=True)]
    one = build_net(partial(LocalNorm, workers=WORKERS))
    spread(plain, one, 1)
    for found, own in zip(gradients(one, x.flatten(0, 1), y.flatten()), zip(*each, strict=True), strict=True):
        close(found, torch.stack(own).mean(0))
    means = {
        name: torch.stack([net.state_dict()[name] for net in nets]).mean(0)
        for name, _ in plain.named_buffers()
        if "running" in name
    }
    want = copy_of(plain)
    want.load_state_dict(means, strict=False)
    close(one.train(False)(x[0]), want.train(False)(x[0]))


def test_joined_replicas_that_are_equal_are_one_net_with_one_batch(plain):
    x, y = batch()
    one = copy_of(plain)
    want = gradients(one, x.flatten(0, 1), y.flatten())
    replicas = build_net(partial(JoinedNorm, replicas=WORKERS), WORKERS)
    spread(plain, replicas, WORKERS)
    told = replicas(x.squeeze(2).transpose(0, 1)).reshape(BATCH * WORKERS, 10)
    loss = nn.functional.cross_entropy(told, y.T.flatten(), reduction="sum") / BATCH
    loss.backward()
    for parameter, mean in zip(replicas.parameters(), want, strict=True):
        close(parameter.grad.view(WORKERS, *mean.shape).mean(0), mean)
    close(first_of(replicas).train(False)(x[0]), one.train(False)(x[0]))


def test_replicas_are_averaged(plain):
    replicas = build_net(partial(JoinedNorm, replicas=2), 2)
    other = copy_of(plain)
    for parameter in other.parameters():
        nn.init.normal_(parameter)
    want = []
    for mine, a, b in zip(replicas.parameters(), plain.parameters(), other.parameters(), strict=True):
        mine.data.copy_(torch.cat([a, b]))
        want.append((a + b) / 2)
    average(replicas, 2)
    for mine, mean in zip(replicas.parameters(), want, strict=True):
        close(mine.data, torch.cat([mean, mean]))


def test_accuracy_is_the_share_of_right_answers():
    images = Images("made up", np.zeros((1007, 28, 28), np.uint8), np.arange(1007, dtype=np.uint8) % 4)
    answer_2 = nn.Sequential(nn.Flatten(), nn.Linear(784, 10)).float()
    nn.init.zeros_(answer_2[1].weight)
    answer_2[1].bias.data = torch.eye(10, dtype=torch.float32)[2]
    assert measure_accuracy(answer_2, images) == 252 / 1007


def test_workers_of_few_classes_have_one_each_and_all_draw_the_same():
    labels = np.random.default_rng(0).integers(0, 10, 500).astype(np.uint8)
    draws, again = (cases.Draws(cases.CASES["few-classes"], labels, workers=8, seed=3) for _ in range(2))
    seen = set()
    for step in range(20):
        chosen = draws.step(step)
        assert chosen.shape == (8, 2)
        own = labels[chosen]
        np.testing.assert_array_equal(own[:, 0], own[:, 1])
        assert len(set(own[:, 0])) == 8
        seen |= set(own[:, 0])
    assert len(seen) == 10
    np.testing.assert_array_equal(again.step(7), draws.step(7))
    assert not np.array_equal(draws.step(7), draws.step(8))
    assert cases.Draws(cases.CASES["batch-1"], labels, workers=8, seed=3).step(0).shape == (8, 1)
    with pytest.raises(UsageError, match="11 workers"):
        cases.Draws(cases.CASES["few-classes"], labels, workers=11, seed=3)


def row(norm, seed, accuracy):
    return bench.Row("batch-1", norm, "every", 8, 1, 1500, seed, accuracy, None, None)


def test_summary_takes_means_and_the_share_that_is_recovered():
    rows = [row("local", 0, 0.5), row("local", 1, 0.7), row("shared", 0, 0.75), row("shared", 1, 0.75)]
    rows += [row("joined", 0, 0.8), row("joined", 1, 0.8)]
    (found,) = bench.summarise(rows)
    assert (found.seeds, found.joined) == (2, 0.8)
    assert found.recovered == pytest.approx(0.75)  # from 0.6 to 0.8
    (found,) = bench.summarise([row("local", 0, 0.8), row("shared", 0, 0.5), row("joined", 0, 0.805)])
    assert found.recovered is None


@pytest.mark.parametrize(("norm", "is_refused"), [("local", False), ("shared", True)])
def test_replicas_with_shared_statistics_must_agree_on_them(norm, is_refused):
    results = [Result(0.5, "same", buffers, [0.1], Tally(), Tally()) for buffers in ("one", "other")]
    task = Task("plain", norm, 0, 1, 2)
    if is_refused:
        with pytest.raises(ShoestringError, match="different statistics"):
            runs.check(task, results)
    else:
        runs.check(task, results)
    results[0].parameters = "another"
    with pytest.raises(ShoestringError, match="different parameters"):
        runs.check(task, results)


def test_a_step_time_has_its_share_of_the_round():
    result = Result(None, "", "", [9.0, *[0.001, 0.003] * 5], Tally(), Tally())
    assert runs.step_ms_of(result, 2, skipped=1) == pytest.approx(2.0)


def test_exchanges_of_a_step_wait_for_each_other():
    sizes = delay.exchange_sizes([16, 64])
    assert sizes == [4 * 33, 4 * 129, 4 * 128, 4 * 32]
    with SlowLink(None, 0.005) as link:
        assert delay.time_exchanges(link, sizes) >= 4 * 5.0
        assert link.bytes_to_right == link.bytes_to_left


def put_images(folder):
    source = np.random.default_rng(4)
    for part, count in (("train", 400), ("t10k", 50)):
        for name, array in (
            ("images-idx3", source.integers(0, 256, (count, 28, 28), np.uint8)),
            ("labels-idx1", source.integers(0, 10, count).astype(np.uint8)),
        ):
            head = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
            (folder / f"{part}-{name}-ubyte").write_bytes(head + array.tobytes())


@pytest.mark.slow
def test_a_tiny_run_gives_all_rows(tmp_path, monkeypatch, capsys):
    put_images(tmp_path)
    torch.set_default_dtype(torch.float32)
    tiny = replace(bench.QUICK, steps=6, policies=("local",), delay_batches=(), workers=2)
    monkeypatch.setattr(bench, "QUICK", tiny)
    file = tmp_path / "result.json"
    options = ["--quick", "--case", "few-classes", "--data", str(tmp_path), "--output", str(file), "--json"]
    with pytest.raises(SystemExit) as left:
        main([*options])
    out, err = capsys.readouterr()
    assert left.value.code == 0, err
    result = json.loads(out, parse_constant=pytest.fail)
    assert json.loads(file.read_text()) == result
    assert [(one["norm"], one["policy"], one["steps"]) for one in result["rows"]] == [
        (norm, "local-8", 8) for norm in ("local", "shared", "joined")
    ]
    assert all(0 <= one["accuracy"] <= 1 for one in result["rows"])
    (traffic,) = result["traffic"]
    assert (traffic["extra_messages"], traffic["layers"], traffic["channels"]) == (0, 9, 336)
    assert traffic["messages"] > 0
    for way in ("up", "down"):  # a round in eight steps
        assert 10 <= 8 * traffic[f"extra_{way}_bytes_per_channel"] <= 12
    assert [one["seeds"] for one in result["summary"]] == [1]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--case", "many"], "there is no case `many`"),
        (["--policy", "bounded"], "`--policy bounded`"),
    ],
)
def test_mistakes_are_named_before_anything_runs(options, problem, capsys):
    with pytest.raises(SystemExit) as left:
        main([*options])
    assert left.value.code != 0
    assert problem in capsys.readouterr().err
