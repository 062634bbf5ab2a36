"""The gradient is that of the formula, and workers that know each other make up one large batch."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from shoestring.worker.batchnorm import normalise as shared
from shoestring.worker.batchnorm.normalise import (
    AMPLIFICATION,
    SHIFT,
    How,
    Normalise,
    OnCpu,
    Others,
    Seen,
    join,
)

EPS = 1e-5
CHANNELS = 3
SHAPES = [(4, 3), (2, 3), (1, 3), (3, 3, 4), (1, 3, 5), (2, 3, 2, 3), (2, 3, 1, 2, 2)]


@pytest.fixture(scope="module", autouse=True)
def one_torch_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def draw(seed: int, *shape: int, dtype=torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def others(seed: int = 1, *, count: float = 7.5, mean: float = 0.5, variance: float = 2.0, **rest) -> Others:
    """Others without slopes: what is left is the derivative of this worker's own loss."""
    spread = draw(seed, CHANNELS).abs()
    zeros = torch.zeros(CHANNELS, dtype=torch.float64)
    return Others(count, mean + 0.1 * spread, variance * (1 + spread), zeros, zeros, **rest)


OTHERS = {
    "nobody": None,
    "alike": others(),
    "few": others(count=0.03),
    "many": others(count=4000.0),
    "amplified to the limit": others(count=900.0, mean=0.0, variance=1e-4),
    "shifted to the limit": others(count=500.0, mean=40.0, variance=1e-3),
    "both": others(count=1e5, mean=-9.0, variance=1e-9),
}


def normalise(
    x: Tensor, weight: Tensor, bias: Tensor, known: Others | None, note=lambda seen: None
) -> Tensor:
    return shared.normalise(x, weight, bias, known, note, EPS, False)


def inputs(shape: tuple[int, ...], dtype=torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    leaves = draw(2, *shape), 1 + 0.3 * draw(3, CHANNELS), draw(4, CHANNELS)
    x, weight, bias = (leaf.to(dtype).requires_grad_() for leaf in leaves)
    return x, weight, bias


@pytest.mark.parametrize("known", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradcheck(shape: tuple[int, ...], known: Others | None) -> None:
    assert torch.autograd.gradcheck(lambda *leaves: normalise(*leaves, known), inputs(shape))


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    dims = [dim for dim in range(x.dim()) if dim != 1]
    return x.mean(dims), x.var(dims, correction=0)


def test_the_cases_of_the_gradcheck_are_inside_and_outside_the_limits() -> None:
    mean, variance = moments(inputs((2, 3, 2, 3))[0])
    for name, known in OTHERS.items():
        if known is None:
            continue
        joint_mean, joint = join(mean, variance, 12, known, EPS)
        is_amplified = torch.isclose(joint + EPS, (variance + EPS) / AMPLIFICATION**2).any()
        is_shifted = torch.isclose((joint_mean - mean).abs(), SHIFT * (joint + EPS).sqrt()).any()
        want = {"amplified to the limit": (True, False), "shifted to the limit": (False, True)}
        want |= {"both": (True, True)}
        assert (bool(is_amplified), bool(is_shifted)) == want.get(name, (False, False)), name


@pytest.mark.parametrize("seed", range(20))
def test_values_are_amplified_and_shifted_no_further_than_the_limits(seed: int) -> None:
    known = dataclasses.replace(
        others(seed), mean=10 ** draw(seed + 1, CHANNELS), variance=10 ** (4 * draw(seed + 2, CHANNELS))
    )
    mean, variance = draw(seed + 3, CHANNELS), draw(seed + 4, CHANNELS).abs()
    joint_mean, joint = join(mean, variance, 1 + seed, known, EPS)
    deviation = (joint + EPS).sqrt()
    slack = 1 + 1e-12
    assert ((variance + EPS).sqrt() / deviation <= AMPLIFICATION * slack).all()
    assert ((joint_mean - mean).abs() <= SHIFT * deviation * slack).all()


def joined(batches: list[Tensor], upstream: list[Tensor], weight: Tensor, bias: Tensor):
    """What one large batch gives: outputs and gradients of each worker's part."""
    xs = [x.detach().double().requires_grad_() for x in batches]
    leaves = [t.detach().double().requires_grad_() for t in (weight, bias)]
    # Batches of different shapes meet as [1, C, values].
    flat = torch.cat([x.transpose(0, 1).reshape(CHANNELS, -1) for x in xs], 1).unsqueeze(0)
    y = nn.functional.batch_norm(flat, None, None, *leaves, True, 0.0, EPS)
    sizes = [x.numel() // CHANNELS for x in xs]
    ys = [
        part[0].reshape(CHANNELS, x.shape[0], *x.shape[2:]).transpose(0, 1)
        for part, x in zip(y.split(sizes, 2), xs, strict=True)
    ]
    loss = sum((own * dy.double()).sum() for own, dy in zip(ys, upstream, strict=True))
    gradients = torch.autograd.grad(loss, [*xs, *leaves])
    mean, variance = moments(flat)
    hats = [
        (x.transpose(0, 1).reshape(CHANNELS, -1) - mean[:, None]) / (variance[:, None] + EPS).sqrt()
        for x in xs
    ]
    return ys, gradients, [hat.detach() for hat in hats]


def known_by(me: int, batches: list[Tensor], upstream: list[Tensor], weight: Tensor, hats: list[Tensor]):
    """The others of worker `me`, with fresh statistics."""
    far = [index for index in range(len(batches)) if index != me]
    values = torch.cat([batches[i].double().transpose(0, 1).reshape(CHANNELS, -1) for i in far], 1)
    slopes = torch.cat([upstream[i].double().transpose(0, 1).reshape(CHANNELS, -1) for i in far], 1)
    slopes = slopes * weight.detach().double()[:, None]
    hat = torch.cat([hats[i] for i in far], 1)
    rows = values.mean(1), values.var(1, correction=0), slopes.mean(1), (slopes * hat).mean(1)
    return Others(values.shape[1], *(row.to(weight.dtype) for row in rows))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("sizes", [(4, 4), (1, 1, 1, 1), (6, 1, 3), (1, 31)], ids=str)
@pytest.mark.parametrize("tail", [(), (5,), (2, 3), (2, 1, 2)], ids=str)
def test_workers_with_fresh_statistics_make_up_one_large_batch(
    tail: tuple[int, ...], sizes: tuple[int, ...], dtype: torch.dtype
) -> None:
    batches = [draw(10 + i, n, CHANNELS, *tail).to(dtype) for i, n in enumerate(sizes)]
    upstream = [draw(50 + i, n, CHANNELS, *tail).to(dtype) for i, n in enumerate(sizes)]
    _, weight, bias = inputs((1, CHANNELS), dtype)
    ys, gradients, hats = joined(batches, upstream, weight, bias)
    eps = torch.finfo(dtype).eps
    sums = [torch.zeros(CHANNELS, dtype=torch.float64) for _ in range(2)]
    for me, x in enumerate(batches):
        x = x.clone().requires_grad_()
        y = normalise(x, weight, bias, known_by(me, batches, upstream, weight, hats))
        own = torch.autograd.grad(y, [x, weight, bias], upstream[me])
        # Each value takes some dozen roundings of numbers no larger than the largest result; the
        # sums over a channel's n values add a rounding each.
        bound = (64 + x.numel()) * eps
        assert (y - ys[me]).abs().max() <= bound * ys[me].abs().max()
        assert (own[0] - gradients[me]).abs().max() <= bound * max(gradients[me].abs().max(), 1)
        for total, part in zip(sums, own[1:], strict=True):
            total += part.double()
    for total, want in zip(sums, gradients[-2:], strict=True):
        assert (total - want).abs().max() <= 256 * eps * max(want.abs().max(), 1)


def test_without_the_others_slopes_the_gradient_is_another_one() -> None:
    """So the test above needs them."""
    batches = [draw(1, 4, CHANNELS), draw(2, 4, CHANNELS)]
    upstream = [draw(3, 4, CHANNELS), draw(4, 4, CHANNELS)]
    x, weight, bias = inputs((4, CHANNELS))
    _, gradients, hats = joined(batches, upstream, weight, bias)
    known = known_by(0, batches, upstream, weight, hats)
    silent = dataclasses.replace(known, shift=torch.zeros(3), scale=torch.zeros(3))
    x = batches[0].clone().requires_grad_()
    (dx,) = torch.autograd.grad(normalise(x, weight, bias, silent), x, upstream[0])
    assert (dx - gradients[0]).abs().max() > 0.05


@pytest.mark.parametrize("shape", SHAPES[:2] + SHAPES[3:], ids=str)
@pytest.mark.parametrize("name", [name for name in OTHERS if name != "nobody"])
def test_with_local_steps_it_is_batch_renormalisation(name: str, shape: tuple[int, ...]) -> None:
    known = dataclasses.replace(OTHERS[name], is_local=True)
    x, weight, bias = inputs(shape)
    upstream = draw(9, *shape)
    y = normalise(x, weight, bias, known)
    got = torch.autograd.grad(y, [x, weight, bias], upstream)
    mean, variance = moments(x)
    joint_mean, joint = join(mean.detach(), variance.detach(), x.numel() // CHANNELS, known, EPS)
    view = [1, CHANNELS, *[1] * (x.dim() - 2)]
    own = (variance + EPS).sqrt()
    r = (own.detach() / (joint + EPS).sqrt()).view(view)
    d = ((mean.detach() - joint_mean) / (joint + EPS).sqrt()).view(view)
    hat = (x - mean.view(view)) / own.view(view) * r + d
    want_y = hat * weight.view(view) + bias.view(view)
    torch.testing.assert_close(y, want_y, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(
        got, torch.autograd.grad(want_y, [x, weight, bias], upstream), rtol=1e-9, atol=1e-8
    )


def test_a_backward_pass_tells_once_what_was_seen() -> None:
    told: list[Seen] = []
    x, weight, bias = inputs((2, 3, 2, 3))
    upstream = draw(9, 2, 3, 2, 3)
    y = normalise(x, weight, bias, OTHERS["alike"], told.append)
    assert told == []
    y.backward(upstream)
    (seen,) = told
    assert seen.count == 12
    mean, variance = moments(x)
    found = torch.from_numpy(seen.sums) / seen.count
    torch.testing.assert_close((found[0], found[1] - found[0] ** 2), (mean, variance))
    hat = (y - bias.view(1, 3, 1, 1)) / weight.view(1, 3, 1, 1)
    by_value = upstream * weight.view(1, 3, 1, 1)
    torch.testing.assert_close(found[2], by_value.mean((0, 2, 3)))
    torch.testing.assert_close(found[3], (by_value * hat).mean((0, 2, 3)))


@pytest.mark.parametrize("known", ["nobody", "alike"])
def test_an_input_that_is_not_trained_costs_no_gradient(known: str) -> None:
    x, weight, bias = inputs((4, 3))
    told: list[Seen] = []
    whole = torch.autograd.grad(normalise(x, weight, bias, OTHERS[known]).square().sum(), [weight, bias])
    y = normalise(x.detach(), weight, bias, OTHERS[known], told.append)
    part = torch.autograd.grad(y.square().sum(), [weight, bias])
    assert all(map(torch.equal, whole, part))
    assert len(told) == 1


@pytest.mark.parametrize("known", ["nobody", "alike", "many"])
def test_bfloat16_values_are_rounded_once_each_way(known: str) -> None:
    """The statistics, sums and what comes back are float32 until the very end."""
    x = (10 + draw(1, 16, 3, 4, 4)).bfloat16()
    upstream = draw(2, 16, 3, 4, 4).bfloat16()
    _, weight, bias = inputs((1, 3), torch.float32)
    told: list[Seen] = []
    results = []
    for values in (x, x.float()):
        values = values.clone().requires_grad_()
        y = normalise(values, weight, bias, OTHERS[known], told.append)
        assert y.dtype == values.dtype
        results.append((y, *torch.autograd.grad(y, [values, weight, bias], upstream.to(values.dtype))))
    low, high = told
    torch.testing.assert_close(low.sums / low.count, high.sums / high.count, rtol=1e-4, atol=1e-4)
    for got, want in itertools.islice(zip(*results, strict=True), 2):
        assert (got.float() - want).abs().max() <= 2**-8 * want.abs().max()  # half a unit is 2**-9


@pytest.mark.parametrize("known", ["nobody", "alike"])
def test_any_layout_in_memory_gives_the_same(known: str) -> None:
    plain = draw(1, 4, 3, 5, 2)
    upstream = draw(2, 4, 3, 5, 2)
    _, weight, bias = inputs((1, 3))
    results = []
    for x in (
        plain,
        plain.to(memory_format=torch.channels_last),
        plain.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
    ):
        x = x.detach().requires_grad_()
        y = normalise(x, weight, bias, OTHERS[known])
        results.append((y, *torch.autograd.grad(y, [x, weight, bias], upstream)))
    for other in results[1:]:
        torch.testing.assert_close(other, results[0])


def test_others_come_to_the_type_of_the_values() -> None:
    x, weight, bias = inputs((4, 3), torch.float32)
    known = OTHERS["alike"]
    assert normalise(x, weight, bias, known).dtype == torch.float32
    plain = known.like(known.mean)
    assert plain.mean.dtype == np.float64
    assert plain.like(known.mean) is plain


@pytest.mark.parametrize("is_local", [False, True])
@pytest.mark.parametrize("known", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_compiled_loops_and_torchs_operations_agree(
    shape: tuple[int, ...], known: Others | None, is_local: bool
) -> None:
    known = known and dataclasses.replace(known, shift=draw(7, 3), scale=draw(8, 3), is_local=is_local)
    upstream = draw(9, *shape)
    results, told = [], []
    for way in (OnCpu, Normalise):
        x, weight, bias = inputs(shape)
        y = way.apply(x, weight, bias, How(known, told.append, EPS, False))
        results.append((y, *torch.autograd.grad(y, [x, weight, bias], upstream)))
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-9)
    assert told[0].count == told[1].count
    np.testing.assert_allclose(told[0].sums, told[1].sums, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_large_offset_costs_no_accuracy(dtype: torch.dtype) -> None:
    """Values far from zero are normalised by what they differ by: their mean is not rounded away."""
    x = (1000 + draw(1, 8, 3, 16)).to(dtype)
    _, weight, bias = inputs((1, 3), dtype)
    y = normalise(x, weight, bias, None)
    want = nn.functional.batch_norm(x.double(), None, None, weight.double(), bias.double(), True, 0.0, EPS)
    assert (y - want).abs().max() <= 1000 * torch.finfo(dtype).eps * 4
