"""Shared layers are the layers they were: same names, values and behaviour, until a run shares them."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shoestring.config import Run
from shoestring.errors import UsageError
from shoestring.observe.events import EventLog
from shoestring.worker.batchnorm.layers import (
    SharedBatchNorm,
    share_batchnorm,
    shared_layers,
    unshare_batchnorm,
)
from shoestring.worker.batchnorm.statistics import LayerRecord
from shoestring.worker.session import Session
from shoestring.worker.wrap import join

KINDS = {nn.BatchNorm1d: (6, 4), nn.BatchNorm2d: (6, 4, 3, 3), nn.BatchNorm3d: (6, 4, 2, 3, 2)}


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def sharing(layer: nn.Module) -> LayerRecord:
    """Share a layer as a run of several workers would."""
    share_batchnorm(layer)
    layer.record = LayerRecord(0.8)
    return layer.record


@pytest.mark.parametrize(
    "settings", [{}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}]
)
@pytest.mark.parametrize("kind", KINDS)
def test_outside_a_run_it_is_the_layer_it_was_bit_for_bit(kind, settings) -> None:
    plain = kind(4, **settings)
    shared = share_batchnorm(copy.deepcopy(plain))
    assert isinstance(shared, SharedBatchNorm)
    for step in range(3):
        results = []
        for layer in (plain, shared):
            x = draw(step, *KINDS[kind]).requires_grad_()
            y = layer(x)
            y.square().sum().backward()
            results.append([y, x.grad, *(p.grad.clone() for p in layer.parameters()), *layer.buffers()])
        assert all(map(torch.equal, *results))
    plain.eval(), shared.eval()
    assert torch.equal(plain(x), shared(x))


def test_alone_in_a_run_it_trains_as_a_plain_layer_does() -> None:
    hashes = []
    for share in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)
        )
        if share:
            share_batchnorm(model)
        here = Session(Run(), "1", EventLog(None, "test"))
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        model, optimizer = join(here, model, optimizer, codec="float32", policy="every")
        for step in range(8):
            nn.functional.cross_entropy(model(draw(step, 5, 1, 8, 8)), torch.arange(5) % 3).backward()
            optimizer.step()
            optimizer.zero_grad()
        hashes.append((optimizer.parameter_hash(), [b.tolist() for b in model.buffers()]))
        here.close()
    assert hashes[0] == hashes[1]


class Twice(nn.Module):
    """One layer under two names, and in a list besides."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.BatchNorm1d(4)
        self.second = self.first
        self.more = nn.Sequential(nn.Linear(4, 4), self.first, nn.ReLU(), self.first)


@pytest.mark.parametrize(
    "build", [Twice, lambda: nn.Sequential(nn.BatchNorm1d(4)), lambda: nn.BatchNorm1d(4)]
)
def test_layers_stay_the_same_objects_and_come_back(build) -> None:
    model = build()
    before = {name: (module, type(module)) for name, module in model.named_modules(remove_duplicate=False)}
    values = dict(model.state_dict(keep_vars=True))
    assert share_batchnorm(model) is model
    for name, module in model.named_modules(remove_duplicate=False):
        assert module is before[name][0]
        assert not isinstance(module, nn.BatchNorm1d)
    assert len(list(shared_layers(model))) == 1
    assert unshare_batchnorm(model) is model
    assert {n: (m, type(m)) for n, m in model.named_modules(remove_duplicate=False)} == before
    now = model.state_dict(keep_vars=True)
    assert list(now) == list(values)
    assert all(now[name] is values[name] for name in values)
    assert not list(shared_layers(model))


def test_a_state_dict_fits_either_kind() -> None:
    plain = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    shared = share_batchnorm(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
    plain(draw(0, 5, 3))
    shared.load_state_dict(plain.state_dict())
    assert all(map(torch.equal, shared.state_dict().values(), plain.state_dict().values()))
    shared(draw(1, 5, 3))
    plain.load_state_dict(shared.state_dict())
    assert all(map(torch.equal, shared.state_dict().values(), plain.state_dict().values()))


class Renamed(nn.BatchNorm2d):
    """Plain but for its default."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, momentum=0.01)


def test_what_a_layer_has_besides_comes_back_with_it() -> None:
    sync = nn.SyncBatchNorm(4, process_group="some")
    calls = []
    own = Renamed(4)
    own.register_forward_hook(lambda *_: calls.append(1))
    model = nn.ModuleList([sync, own]).eval()
    share_batchnorm(model)
    own(draw(0, 2, 4, 3, 3))
    assert calls == [1]
    unshare_batchnorm(model)
    assert (type(sync), sync.process_group, type(own)) == (nn.SyncBatchNorm, "some", Renamed)
    assert not own.training
    assert "horizon" not in vars(own)


class Activated(nn.BatchNorm2d):
    def forward(self, input):
        return super().forward(input).relu()


@pytest.mark.parametrize(
    ("layer", "message"),
    [(nn.LazyBatchNorm2d(), "does not know its channels"), (Activated(3), "does more than a BatchNorm")],
)
def test_layers_that_cannot_be_shared_are_refused_and_none_is_changed(layer, message: str) -> None:
    model = nn.Sequential(nn.BatchNorm2d(3), layer)
    with pytest.raises(UsageError, match=f"`{type(layer).__name__}`.*{message}"):
        share_batchnorm(model)
    assert type(model[0]) is nn.BatchNorm2d


def test_a_lazy_layer_that_has_seen_a_batch_is_shared() -> None:
    model = nn.Sequential(nn.LazyBatchNorm1d())
    model(draw(0, 4, 5))
    assert share_batchnorm(model)[0].num_features == 5


@pytest.mark.parametrize("horizon", [0.5, 0, -1, float("nan"), float("inf"), 1e17])
def test_a_horizon_that_cannot_be_kept_is_refused(horizon: float) -> None:
    with pytest.raises(UsageError, match="horizon"):
        share_batchnorm(nn.BatchNorm1d(3), horizon=horizon)


def test_a_horizon_can_be_set_again_but_not_after_wrap() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    assert share_batchnorm(share_batchnorm(model), horizon=9)[1].horizon == 9
    here = Session(Run(), "1", EventLog(None, "test"))
    join(here, model, torch.optim.SGD(model.parameters(), 0.1), codec="float32", policy="every")
    with pytest.raises(UsageError, match="wrapped already"):
        share_batchnorm(model)
    here.close()


def test_inputs_of_another_dimension_are_refused_as_before() -> None:
    layer = share_batchnorm(nn.BatchNorm2d(3))
    with pytest.raises(ValueError, match="expected 4D"):
        layer(draw(0, 4, 3))


def test_one_value_a_channel() -> None:
    """Alone it is refused as torch does; with other workers it normalises to 0 until they are known."""
    alone = share_batchnorm(nn.BatchNorm1d(4))
    with pytest.raises(ValueError, match="more than 1 value"):
        alone(draw(0, 1, 4))
    layer = nn.BatchNorm1d(4)
    record = sharing(layer)
    x = draw(0, 1, 4).requires_grad_()
    y = layer(x)
    y.sum().backward()
    # 1 / sqrt(eps) is 316, and what it multiplies cancels but for roundings.
    bound = 4 * 316 * torch.finfo(torch.float32).eps * x.abs().max()
    assert (y - layer.bias).abs().max() <= bound
    assert x.grad.abs().max() <= bound
    weight, count, sums = record.take()
    assert (weight, count) == (1.0, 1.0)
    assert torch.equal(torch.from_numpy(sums[0]), x[0].double())


def test_an_empty_batch_tells_nothing() -> None:
    layer = nn.BatchNorm1d(4)
    record = sharing(layer)
    layer(draw(0, 0, 4)).sum().backward()
    assert record.take() == (1.0, 0.0, None)


def test_in_evaluation_the_running_statistics_are_used() -> None:
    plain, shared = nn.BatchNorm2d(3), nn.BatchNorm2d(3)
    record = sharing(shared)
    plain(x := draw(0, 4, 3, 2, 2))
    shared.load_state_dict(plain.state_dict())
    assert torch.equal(shared.eval()(x), plain.eval()(x))
    assert record.take()[2] is None


def passes(record: LayerRecord) -> float:
    return record.take()[1]


def test_a_pass_counts_if_it_is_trained() -> None:
    layer = nn.BatchNorm1d(4)
    record = sharing(layer)
    x = draw(0, 5, 4)
    with torch.no_grad():
        layer(x)
    layer(x)  # of which nothing comes back
    assert passes(record) == 0
    layer(x).sum().backward()
    layer(x).sum().backward()
    assert passes(record) == 10


@pytest.mark.parametrize("settings", [{"affine": False}, {"track_running_stats": False}, {}])
def test_layers_without_parameters_or_buffers_and_frozen_ones(settings) -> None:
    layer = nn.BatchNorm1d(4, **settings).requires_grad_(False)
    record = sharing(layer)
    x = draw(0, 5, 4).requires_grad_()
    want = nn.functional.batch_norm(x, None, None, training=True)
    y = layer(x)
    torch.testing.assert_close(y, want)
    upstream = draw(1, 5, 4)
    torch.testing.assert_close(torch.autograd.grad(y, x, upstream), torch.autograd.grad(want, x, upstream))
    assert passes(record) == 5


def test_a_frozen_start_of_a_model_counts_in_forward_and_only_when_training() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4).requires_grad_(False), nn.Linear(4, 4), nn.ReLU())
    record = sharing(model[0])
    model(draw(0, 5, 4)).sum().backward()
    assert passes(record) == 5
    with torch.no_grad():
        model(draw(0, 5, 4))
    assert passes(record) == 0
    checkpoint(model, draw(0, 5, 4), use_reentrant=False).sum().backward()
    assert passes(record) == 5


def test_activation_checkpointing_counts_a_batch_once() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 4))
    record = sharing(model[1])
    x = draw(0, 5, 4).requires_grad_()
    results = []
    for run in (lambda: model(x), lambda: checkpoint(model, x, use_reentrant=False)):
        y = run()
        results.append([y, *torch.autograd.grad(y.square().sum(), [x, *model.parameters()])])
        taken = record.take()
        assert taken[1] == 5
        results[-1].append(torch.from_numpy(taken[2]))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("affine", [True, False])
def test_bfloat16_autocast(affine: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, affine=affine, track_running_stats=affine))
    record = sharing(model[1])
    x = draw(0, 5, 3, 6, 6)
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
    assert y.dtype == torch.bfloat16
    y.float().square().mean().backward()
    assert all(torch.isfinite(p.grad).all() and p.grad.dtype == torch.float32 for p in model.parameters())
    assert passes(record) == 5 * 16


def test_a_double_model_stays_double() -> None:
    layer = nn.BatchNorm1d(4, affine=False, track_running_stats=False)
    sharing(layer)
    assert layer(draw(0, 5, 4).double()).dtype == torch.float64


def test_a_copy_of_a_model_is_on_its_own() -> None:
    layer = nn.BatchNorm1d(4)
    record = sharing(layer)
    copied = copy.deepcopy(layer)
    copied(draw(0, 5, 4)).sum().backward()
    assert passes(record) == 0
    assert "horizon=5" in repr(copied)
