"""`GradScaler` with the update on the shards: the standard recipe, and what is refused."""

import threading

import pytest
import torch
from torch import nn

from shoestring.config import Run
from shoestring.errors import UsageError
from shoestring.observe.events import EventLog
from shoestring.worker.session import Session
from shoestring.worker.wrap import join
from tests.unit.worker.cluster import Cluster

STEPS = 12
SCALE = 2.0**100  # so that a gradient of 2 ** 30 overflows, and ordinary ones do not
_seeding = threading.Lock()


@pytest.fixture
def alone():
    here = Session(Run(), "1", EventLog(None, "test"))
    yield here
    here.close()


def deep() -> nn.Sequential:
    """Several parts, whose gradients leave at different times."""
    with _seeding:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(200, 200) for _ in range(4)))


def loss_of(model: nn.Sequential, step: int, worker: int = 0, bad: tuple = ()) -> torch.Tensor:
    x = torch.randn(4, 200, generator=torch.Generator().manual_seed(10 * step + worker))
    for place, layer in enumerate(model):
        x = layer(x)
        if place == 1 and (step, worker) in bad:  # then only the first layers' gradients overflow
            x.register_hook(lambda gradient: gradient * 2.0**60)
    return x.square().mean()


def new_scaler(**settings) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", **({"init_scale": SCALE, "growth_interval": 4} | settings))


def recipe(model, optimizer, scaler, step: int, worker: int = 0, bad: tuple = (), *, unscale=False) -> None:
    scaler.scale(loss_of(model, step, worker, bad)).backward()
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


OPTIMIZERS = {
    "momentum": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-3),
}
BAD = ((2, 0), (6, 1), (7, 1))


def reference(kind: str, bad: tuple, **settings) -> tuple[nn.Module, list[float]]:
    """Two workers in one process, as DDP would have them: the mean of scaled gradients, then the recipe."""
    model = deep()
    optimizer, scaler, scales = OPTIMIZERS[kind](model.parameters()), new_scaler(**settings), []
    for step in range(STEPS):
        for worker in (0, 1):
            (scaler.scale(loss_of(model, step, worker, bad)) / 2).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return model, scales


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("bad", [(), BAD], ids=["fine", "overflows"])
def test_the_recipe_gives_what_data_parallel_training_gives(kind, bad, unscale):
    def be_worker(here: Session) -> tuple[str, list[float], nn.Module]:
        model = deep()
        model, optimizer = join(
            here, model, OPTIMIZERS[kind](model.parameters()), codec="float32", policy="every"
        )
        scaler, scales = new_scaler(), []
        for step in range(STEPS):
            recipe(model, optimizer, scaler, step, here.run.worker, bad, unscale=unscale)
            scales.append(scaler.get_scale())
        return optimizer.parameter_hash(), scales, model

    with Cluster(2, 3) as cluster:
        (first, scales, model), (second, others, _) = cluster.train(be_worker)
    plain, want = reference(kind, bad)
    assert first == second
    assert scales == others == want
    assert len(set(scales)) > 1
    for own, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("settings", [{"growth_factor": 3.0, "backoff_factor": 0.3}, {"init_scale": 1e30}])
def test_scales_that_are_no_powers_of_two_are_taken_out_as_torch_does(settings):
    def be_worker(here: Session) -> tuple[str, nn.Module]:
        model = deep()
        model, optimizer = join(
            here, model, OPTIMIZERS["adamw"](model.parameters()), codec="float32", policy="every"
        )
        scaler = new_scaler(**settings)
        for step in range(STEPS):
            recipe(model, optimizer, scaler, step, here.run.worker, BAD)
        return optimizer.parameter_hash(), model

    with Cluster(2, 2) as cluster:
        (first, model), (second, _) = cluster.train(be_worker)
    plain, _ = reference("adamw", BAD, **settings)
    assert first == second
    for own, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("codec", ["float32", "dct"])
@pytest.mark.parametrize("policy", ["every", "every:delay=1"])
@pytest.mark.parametrize("clip_norm", [0.0, 0.01])
def test_scaling_by_a_power_of_two_changes_no_bit(codec, policy, clip_norm):
    def run(*, is_scaled: bool) -> list:
        def be_worker(here: Session) -> tuple[str, float]:
            model = deep()
            optimizer = OPTIMIZERS["adamw"](model.parameters())
            model, optimizer = join(here, model, optimizer, codec=codec, policy=policy, clip_norm=clip_norm)
            scaler = new_scaler(enabled=is_scaled, growth_interval=3)
            for step in range(STEPS):
                recipe(model, optimizer, scaler, step, here.run.worker)
            return optimizer.parameter_hash()

        with Cluster(2, 2) as cluster:
            return cluster.train(be_worker)

    assert run(is_scaled=True) == run(is_scaled=False)


@pytest.mark.parametrize("policy", ["every:delay=1", "bounded:2", "async"])
def test_with_other_policies_an_overflow_hangs_nobody_and_lowers_the_scale(policy):
    def be_worker(here: Session) -> float:
        model = deep()
        model, optimizer = join(
            here, model, OPTIMIZERS["momentum"](model.parameters()), codec="dct", policy=policy
        )
        scaler = new_scaler(growth_interval=1000)
        for step in range(STEPS):
            recipe(model, optimizer, scaler, step, here.run.worker, BAD)
        assert all(parameter.isfinite().all() for parameter in model.parameters())
        return scaler.get_scale()

    with Cluster(2, 2) as cluster:
        scales = cluster.train(be_worker)
    if policy.startswith("every"):
        assert scales == [SCALE / 8] * 2
    else:
        assert scales == [SCALE / 2, SCALE / 4]


@pytest.fixture
def unwatched(monkeypatch):
    """As in a process that has wrapped nothing yet."""
    for name in ("scale", "unscale_", "step"):
        method = getattr(torch.amp.GradScaler, name)
        monkeypatch.setattr(torch.amp.GradScaler, name, getattr(method, "__wrapped__", method))


@pytest.mark.usefixtures("unwatched")
@pytest.mark.parametrize("unscale", [False, True])
def test_local_steps_scale_and_skip_by_themselves(alone, unscale):
    plain, model = deep(), deep()
    own = OPTIMIZERS["adamw"](plain.parameters())
    model, optimizer = join(
        alone, model, OPTIMIZERS["adamw"](model.parameters()), codec="float32", policy="local:2"
    )
    scalers = new_scaler(), new_scaler()
    for step in range(STEPS):
        for net, steps, scaler in zip((plain, model), (own, optimizer), scalers, strict=True):
            recipe(net, steps, scaler, step, 0, ((2, 0), (5, 0)), unscale=unscale)
    assert optimizer.steps == STEPS
    assert scalers[0].get_scale() == scalers[1].get_scale() < SCALE * 8
    for value, want in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(value, want, rtol=1e-5, atol=1e-7)


def test_accumulated_gradients_have_one_scale(alone):
    plain, model = deep(), deep()
    own = OPTIMIZERS["adamw"](plain.parameters())
    model, optimizer = join(
        alone, model, OPTIMIZERS["adamw"](model.parameters()), codec="float32", policy="every"
    )
    scalers = new_scaler(), new_scaler()
    for step in range(STEPS):
        scalers[0].scale(loss_of(plain, step)).backward()
        with model.no_sync():
            scalers[1].scale(loss_of(model, step)).backward()
        for net, steps, scaler in zip((plain, model), (own, optimizer), scalers, strict=True):
            recipe(net, steps, scaler, step + 100)
    for value, want in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(value, want, rtol=1e-4, atol=1e-6)


class Halves(nn.Module):
    """Both layers are in one part; one is left out in odd steps: the part is sent at the step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        return self.first(x) if step % 2 else self.first(x) + self.second(x)


@pytest.mark.parametrize("unscale", [False, True])
def test_parts_that_are_sent_at_the_step_are_unscaled_once(alone, unscale):
    torch.manual_seed(0)
    plain, model = Halves(), Halves()
    model.load_state_dict(plain.state_dict())
    own = OPTIMIZERS["momentum"](plain.parameters())
    model, optimizer = join(
        alone, model, OPTIMIZERS["momentum"](model.parameters()), codec="float32", policy="every"
    )
    scalers = new_scaler(), new_scaler()
    for step in range(6):
        for net, steps, scaler in zip((plain, model), (own, optimizer), scalers, strict=True):
            scaler.scale(net(torch.ones(3, 6), step).square().mean()).backward()
            if unscale:
                scaler.unscale_(steps)
            scaler.step(steps)
            scaler.update()
            steps.zero_grad()
    for value, want in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(value, want, rtol=1e-5, atol=1e-6)


def wrapped(here: Session):
    model = deep()
    return join(here, model, OPTIMIZERS["adamw"](model.parameters()), codec="float32", policy="every")


def test_clipping_after_unscale_is_refused_with_the_line_to_write(alone):
    model, optimizer = wrapped(alone)
    scaler = new_scaler()
    scaler.scale(loss_of(model, 0)).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    with pytest.raises(UsageError, match="changed after it was sent.*clip_norm"):
        scaler.step(optimizer)


@pytest.mark.parametrize("unscale", [False, True])
def test_a_change_before_the_scaler_works_on_gradients_is_refused(alone, unscale):
    model, optimizer = wrapped(alone)
    scaler = new_scaler()
    scaler.scale(loss_of(model, 0)).backward()
    model[3].weight.grad.mul_(0.5)
    with pytest.raises(UsageError, match="`3.weight` was changed"):
        scaler.unscale_(optimizer) if unscale else scaler.step(optimizer)


@pytest.mark.parametrize("unscale", [False, True])
def test_a_hook_that_changes_gradients_at_the_step_is_refused(alone, unscale):
    model, optimizer = wrapped(alone)
    scaler = new_scaler()

    def halve(*_: object) -> None:
        model[3].weight.grad.mul_(0.5)

    optimizer.register_step_pre_hook(halve)
    scaler.scale(loss_of(model, 0)).backward()
    if unscale:
        scaler.unscale_(optimizer)
    with pytest.raises(UsageError, match="`3.weight` was changed"):
        scaler.step(optimizer)


def test_a_step_without_the_scaler_is_refused(alone):
    model, optimizer = wrapped(alone)
    new_scaler().scale(loss_of(model, 0)).backward()
    with pytest.raises(UsageError, match="scaler.step\\(optimizer\\)"):
        optimizer.step()


def test_a_plain_step_after_unscale_is_taken(alone):
    plain, model = deep(), deep()
    own = OPTIMIZERS["adamw"](plain.parameters())
    model, optimizer = join(
        alone, model, OPTIMIZERS["adamw"](model.parameters()), codec="float32", policy="every"
    )
    for net, steps in ((plain, own), (model, optimizer)):
        scaler = new_scaler()
        for step in range(3):
            scaler.scale(loss_of(net, step)).backward()
            scaler.unscale_(steps)
            steps.step()
            steps.zero_grad()
            scaler.update()
    for value, want in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(value, want, rtol=1e-4, atol=1e-6)


def test_losses_that_were_scaled_by_hand_are_refused(alone):
    model, optimizer = wrapped(alone)
    scaler = new_scaler()
    recipe(model, optimizer, scaler, 0)
    (loss_of(model, 1) * scaler.get_scale()).backward()
    with pytest.raises(UsageError, match="no loss was scaled"):
        scaler.step(optimizer)


def test_a_scale_that_changes_before_the_step_is_refused(alone):
    model, optimizer = wrapped(alone)
    scaler = new_scaler()
    scaler.scale(loss_of(model, 0)).backward()
    model[0](torch.ones(1, 200))
    scaler.update(2.0**10)
    with pytest.raises(UsageError, match="another scale"):
        scaler.step(optimizer)


def test_another_scaler_is_refused(alone):
    model, optimizer = wrapped(alone)
    scaler, other = new_scaler(), new_scaler(init_scale=8.0)
    other.scale(torch.ones(()))
    scaler.scale(loss_of(model, 0)).backward()
    with pytest.raises(UsageError, match="another scale"):
        other.step(optimizer)


def test_a_scaler_that_is_switched_off_changes_nothing(alone):
    model, optimizer = wrapped(alone)
    scaler = new_scaler(enabled=False)
    for step in range(2):
        recipe(model, optimizer, scaler, step, unscale=True)
    assert optimizer.steps == 2


def test_scalers_are_watched_once_and_go_on_as_they_did(alone):
    wrapped(alone)
    before = torch.amp.GradScaler.scale, torch.amp.GradScaler.unscale_, torch.amp.GradScaler.step
    wrapped(Session(Run(), "2", EventLog(None, "test")))
    assert before == (torch.amp.GradScaler.scale, torch.amp.GradScaler.unscale_, torch.amp.GradScaler.step)
    plain = deep()
    own, scaler = OPTIMIZERS["adamw"](plain.parameters()), new_scaler()
    recipe(plain, own, scaler, 0, bad=((0, 0),))
    assert scaler.get_scale() == SCALE / 2
    assert own.state == {}
