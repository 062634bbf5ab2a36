"""Kinds of models: buffers, shared and unused parameters, parametrisations, odd attributes."""

import warnings
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

from benchmarks.compatibility.case import Found, World, case
from benchmarks.compatibility.cases.basics import mse, net, train


def _sgd(model: nn.Module, rate: float = 0.05) -> optim.Optimizer:
    return optim.SGD(model.parameters(), rate, momentum=0.9)


# Buffers and different starts.


def _normed(**more: Any) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(16, 32),
        nn.BatchNorm1d(32, **more),
        nn.Tanh(),
        nn.Linear(32, 32),
        nn.Tanh(),
        nn.Linear(32, 4),
    )


@case("BatchNorm")
def batchnorm(world: World) -> Found:
    model = _normed()
    return train(world, model, _sgd(model))


@case("BatchNorm, averages of all steps")
def batchnorm_cumulative(world: World) -> Found:
    model = _normed(momentum=None)
    return train(world, model, _sgd(model))


@case("BatchNorm, evaluated on both workers")
def batchnorm_evaluated(world: World) -> Found:
    """The same inputs give the same outputs: running statistics are the first worker's."""
    model: nn.Module = _normed()
    model, optimizer = world.wrap(model, _sgd(model))
    x, scores = torch.ones(3, 16), []
    for step, (inputs, y) in enumerate(world.batches()):
        loss = mse(model(inputs), y)
        world.note(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 4:
            model.eval()
            with torch.no_grad():
                scores.append(model(x))
            model.train()
    return {"model": model, "shared.scores": scores}


@case("BatchNorm, accumulation in `no_sync`")
def batchnorm_accumulated(world: World) -> Found:
    model: nn.Module = _normed()
    model, optimizer = world.wrap(model, _sgd(model))
    for step, (x, y) in enumerate(world.batches(40)):
        if step % 2 == 0:
            with model.no_sync():
                (mse(model(x), y) / 2).backward()
            continue
        loss = mse(model(x), y) / 2
        world.note(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


@case("BatchNorm, frozen")
def batchnorm_frozen(world: World) -> Found:
    plain = _normed()
    plain[1].requires_grad_(False)
    model, optimizer = world.wrap(plain, optim.SGD([p for p in plain.parameters() if p.requires_grad], 0.1))
    for x, y in world.batches():
        model.train()
        plain[1].eval()
        loss = mse(model(x), y)
        world.note(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


class Centred(nn.Module):
    """Takes away the mean of what it has seen: a buffer that takes part in training."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("hidden", torch.zeros(1), persistent=False)
        self.inner = net()

    def forward(self, x: Tensor) -> Tensor:
        mean, seen, hidden = self.get_buffer("mean"), self.get_buffer("seen"), self.get_buffer("hidden")
        output: Tensor = self.inner(x - mean + hidden)
        if self.training:
            mean.lerp_(x.mean(0), 0.3)
            seen.add_(1)
            hidden.copy_(x.mean() * 0.1)
        return output


@case("buffers that take part in the forward pass")
def buffers(world: World) -> Found:
    model = Centred()
    return train(world, model, _sgd(model))


@case("different first weights on each worker")
def different_weights(world: World) -> Found:
    torch.manual_seed(5 + world.rank)
    model = net()
    return train(world, model, _sgd(model))


@case("different first buffers and frozen weights on each worker")
def different_buffers(world: World) -> Found:
    model = Centred()
    model.inner[0].requires_grad_(False)
    if world.rank == 1:
        model.get_buffer("mean").fill_(2.0)
        model.inner[0].bias.add_(1.0)
    return train(world, model, optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1))


@case("dropout, a seed for each worker")
def dropout(world: World) -> Found:
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 4))
    torch.manual_seed(100 + world.rank)
    return train(world, model, _sgd(model))


# Shared and unused parameters.


class Tied(nn.Module):
    """One matrix, used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(16, 16, bias=False)
        self.up = nn.Linear(16, 16, bias=False)
        self.up.weight = self.down.weight
        self.last = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(self.up(self.down(x).tanh()).tanh())
        return output


@case("tied weights")
def tied(world: World) -> Found:
    model = Tied()
    return train(world, model, _sgd(model))


@case("tied weights, Adam")
def tied_adam(world: World) -> Found:
    model = Tied()
    return train(world, model, optim.Adam(model.parameters(), 0.01))


class Branched(nn.Module):
    """A branch that a step may leave out, and one that no step takes."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.branch, self.never = net(), nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, x: Tensor, *, takes: bool = True) -> Tensor:
        output: Tensor = self.body(x)
        return output + self.branch(x) if takes else output


def _branched(world: World, takes: Any, *, is_adam: bool = False, to_none: bool = True) -> Found:
    model: nn.Module = Branched()
    optimizer = optim.Adam(model.parameters(), 0.01) if is_adam else _sgd(model)
    model, own = world.wrap(model, optimizer, unused=True)
    for step, (x, y) in enumerate(world.batches()):
        loss = mse(model(x, takes=takes(step)), y)
        world.note(loss)
        loss.backward()
        own.step()
        own.zero_grad(set_to_none=to_none)
    return {"model": model, "optimizer": own}


@case("parameters that are never used")
def unused_always(world: World) -> Found:
    return _branched(world, lambda step: True)


@case("parameters that are unused in some steps")
def unused_sometimes(world: World) -> Found:
    return _branched(world, lambda step: step % 3 != 1)


@case("parameters that are unused in some steps, Adam")
def unused_adam(world: World) -> Found:
    return _branched(world, lambda step: step % 3 != 1, is_adam=True)


@case("parameters that are unused in some steps, zeroed in place")
def unused_zeroed(world: World) -> Found:
    return _branched(world, lambda step: step % 3 != 1, to_none=False)


@case("parameters that are unused in the first steps")
def unused_first(world: World) -> Found:
    return _branched(world, lambda step: step > 4, is_adam=True)


@case("parameters that one worker does not use")
def unused_one(world: World) -> Found:
    return _branched(world, lambda step: (step + world.rank) % 2 == 0)


@case("parameters that one worker does not use, Adam")
def unused_one_adam(world: World) -> Found:
    return _branched(world, lambda step: world.rank == 0, is_adam=True)


# Memory and shape.


class Checkpointed(nn.Module):
    """Activations are computed again in backward."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = net(), reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner[1](self.inner[0](x))
        x = checkpoint(self.inner[2:4], x, use_reentrant=self.reentrant)
        output: Tensor = self.inner[4](x)
        return output


@case("activation checkpointing")
def checkpointed(world: World) -> Found:
    model = Checkpointed(reentrant=False)
    return train(world, model, _sgd(model))


@case("activation checkpointing, reentrant")
def checkpointed_reentrant(world: World) -> Found:
    model = Checkpointed(reentrant=True)
    return train(world, model, _sgd(model))


@case("weight norm")
def weight_norm(world: World) -> Found:
    model = net()
    parametrizations.weight_norm(model[0])
    parametrizations.weight_norm(model[2])
    return train(world, model, _sgd(model))


@case("weight norm, the older one")
def weight_norm_older(world: World) -> Found:
    model = net()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        nn.utils.weight_norm(model[2])
    return train(world, model, _sgd(model))


@case("spectral norm")
def spectral_norm(world: World) -> Found:
    model = net()
    parametrizations.spectral_norm(model[2])
    return train(world, model, _sgd(model))


@case("orthogonal weights")
def orthogonal(world: World) -> Found:
    model = net()
    parametrizations.orthogonal(model[2])
    return train(world, model, _sgd(model))


@case("pruned weights")
def pruned(world: World) -> Found:
    model = net()
    prune.l1_unstructured(model[0], "weight", 0.5)
    return train(world, model, _sgd(model))


class Pictures(nn.Module):
    """The 16 inputs as a picture of one channel."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 16, 3, padding=1)
        self.second = nn.Conv2d(16, 16, 3, padding=1)
        self.last = nn.Linear(256, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(-1, 1, 4, 4).contiguous(memory_format=torch.channels_last)
        x = self.second(self.first(x).tanh()).tanh()
        output: Tensor = self.last(x.flatten(1))
        return output


@case("channels last")
def channels_last(world: World) -> Found:
    model: Any = Pictures()
    model = model.to(memory_format=torch.channels_last)
    return train(world, model, _sgd(model))


@case("channels last after `wrap`")
def channels_last_after(world: World) -> Found:
    model: Any = Pictures()
    model, optimizer = world.wrap(model, _sgd(model))
    model = world.again(model.to(memory_format=torch.channels_last))  # else DDP's means are wrong
    for x, y in world.batches():
        loss = mse(model(x), y)
        world.note(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


class Words(nn.Module):
    """Reads the inputs' signs as words; word 0 is padding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 16, padding_idx=0)
        self.reader = nn.LSTM(16, 16, batch_first=True)
        self.last = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        words = (x * 3 + 6).long().clamp(0, 11)
        output: Tensor = self.last(self.reader(self.table(words))[0][:, -1] + self.table(words).mean(1))
        return output


@case("embedding with padding, LSTM")
def words(world: World) -> Found:
    model = Words()
    return train(world, model, optim.Adam(model.parameters(), 0.1))


@case("transformer layer")
def transformer(world: World) -> Found:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, activation="gelu")
    model = nn.Sequential(nn.Unflatten(1, (1, 16)), layer, nn.Flatten(), nn.Linear(16, 4))
    return train(world, model, optim.AdamW(model.parameters(), 0.01))


class Shapes(nn.Module):
    """Parameters of no dimension, of no value, in a list, and one that is a view's base."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.more = nn.ParameterList([nn.Parameter(torch.zeros(4)), nn.Parameter(torch.ones(1, 1))])
        self.turned = nn.Parameter(torch.randn(4, 16).T)  # not contiguous

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.inner(x) * self.scale + self.more[0] * self.more[1]
        return output + x @ self.turned + self.empty.sum()


@case("scalars, empty and transposed parameters")
def shapes(world: World) -> Found:
    model = Shapes()
    return train(world, model, _sgd(model))


@case("a model of several parts")
def several_parts(world: World) -> Found:
    model = nn.Sequential(nn.Linear(16, 700), nn.Tanh(), nn.Linear(700, 700), nn.Tanh(), nn.Linear(700, 4))
    return train(world, model, optim.SGD(model.parameters(), 0.05))


# Odd models.


class Outer(nn.Module):
    """Has a submodule called `module`."""

    def __init__(self) -> None:
        super().__init__()
        self.module = net()

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.module(x)
        return output


@case("a submodule called `module`")
def named_module(world: World) -> Found:
    model = Outer()
    return train(world, model, _sgd(model))


class Slotted(nn.Module):
    """With `__slots__`."""

    __slots__ = ("rate",)

    def __init__(self) -> None:
        super().__init__()
        self.rate = 0.5
        self.inner = net()

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.inner(x) * self.rate
        return output


@case("a module with `__slots__`")
def slotted(world: World) -> Found:
    model = Slotted()
    return train(world, model, _sgd(model))


class Delegating(nn.Module):
    """Asks its inner net for what it does not have, as many wrappers do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()
        self.inner.answer = 42

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner, name)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.inner(x)
        return output


@case("a module with its own `__getattr__`")
def delegating(world: World) -> Found:
    model = Delegating()
    found = train(world, model, _sgd(model))
    return {**found, "answer": model.answer}


class Callable(nn.Module):
    """Has its own `__call__`, `train` and `parameters`."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()
        self.calls = 0

    def __call__(self, *args: Any, **more: Any) -> Any:
        self.calls += 1
        return super().__call__(*args, **more)

    def train(self, mode: bool = True) -> "Callable":
        super().train(mode)
        return self

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.inner(x)
        return output


@case("a module with its own `__call__`")
def own_call(world: World) -> Found:
    model = Callable()
    found = train(world, model, _sgd(model))
    return {**found, "calls": model.calls}


class Structured(nn.Module):
    """Takes keywords and gives a dict with the loss in it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def forward(self, *, inputs: Tensor, wanted: Tensor | None = None) -> dict[str, Any]:
        output = self.inner(inputs)
        loss = None if wanted is None else mse(output, wanted)
        return {"loss": loss, "outputs": (output, None)}


@case("a dict as output, keywords as input")
def structured(world: World) -> Found:
    model: nn.Module = Structured()
    model, optimizer = world.wrap(model, _sgd(model))
    for x, y in world.batches():
        loss = model(inputs=x, wanted=y)["loss"]
        world.note(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


@case("`model.module`")
def inner_module(world: World) -> Found:
    plain = net()
    kept = plain[0].weight
    model, optimizer = world.wrap(plain, _sgd(plain))
    inner: Any = model.module
    assert inner[0].weight is kept
    found: list[Tensor] = []
    for x, y in world.batches():
        loss = mse(model(x), y)
        world.note(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            found.append(inner(x).mean())
    return {"model": model, "optimizer": optimizer, "seen": found, "keys": len(inner.state_dict())}


class Halves(nn.Module):
    """Has methods of its own that a script calls instead of `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 4)

    def encode(self, x: Tensor) -> Tensor:
        code: Tensor = self.first(x).tanh()
        return code

    def decode(self, code: Tensor) -> Tensor:
        output: Tensor = self.last(code)
        return output

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x))


@case("methods other than `forward`")
def other_methods(world: World) -> Found:
    model: Any = Halves()
    model, optimizer = world.wrap(model, _sgd(model))
    for x, y in world.batches():
        output = model(x) if world.is_ddp else model.decode(model.encode(x))
        loss = mse(output, y)
        world.note(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


@case("trained in eval mode")
def eval_mode(world: World) -> Found:
    model: Any = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Dropout(0.5), nn.Linear(64, 4))
    model, optimizer = world.wrap(model, _sgd(model, 0.02))
    model.eval()
    for x, y in world.batches():
        loss = mse(model(x), y)
        world.note(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


@case("parts of a model wrapped one by one", modes=("wrap-model",))
def part_by_part(world: World) -> Found:
    model: Any = Halves()
    model.first, model.last = world.model(model.first), world.model(model.last)
    optimizer = optim.Adam(model.parameters(), 0.02)
    for x, y in world.batches():
        loss = mse(model(x), y)
        world.note(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    first, last = model.first, model.last
    return {"first": first, "last": last, "optimizer": optimizer}


@case("hooks of the user: forward, backward, on a parameter")
def user_hooks(world: World) -> Found:
    model = net()
    seen: list[float] = []

    def note(module: Any, inputs: Any, outputs: Any) -> None:
        seen.append(float(outputs[0].sum()))

    model[0].register_forward_pre_hook(lambda module, inputs: (inputs[0] * 0.9,))
    model[2].register_forward_hook(lambda module, inputs, output: output * 1.1)
    model[4].register_full_backward_hook(note)
    model[4].weight.register_hook(lambda gradient: gradient * 0.5)
    return {**train(world, model, _sgd(model)), "seen": seen}


@case("hooks of the user, after `wrap`")
def user_hooks_after(world: World) -> Found:
    plain = net()
    model, optimizer = world.wrap(plain, _sgd(plain))
    plain[4].weight.register_hook(lambda gradient: gradient * 0.5)
    model.register_forward_hook(lambda module, inputs, output: output * 1.1)
    for x, y in world.batches():
        loss = mse(model(x), y)
        world.note(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


@case("a layer replaced halfway")
def layer_replaced(world: World) -> Found:
    plain = net()
    model, optimizer = world.wrap(plain, optim.Adam(plain.parameters(), 0.01))
    for step, (x, y) in enumerate(world.batches()):
        if step == 8:
            torch.manual_seed(9)
            plain[4] = nn.Linear(32, 4)
            optimizer.add_param_group({"params": list(plain[4].parameters())})
            model = world.again(model)
        loss = mse(model(x), y)
        world.note(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model}


@case("a layer added halfway")
def layer_added(world: World) -> Found:
    plain = net()
    model, optimizer = world.wrap(plain, optim.SGD(plain.parameters(), 0.1))
    for step, (x, y) in enumerate(world.batches()):
        if step == 8:
            torch.manual_seed(9)
            plain.append(nn.Linear(4, 4))
            with torch.no_grad():
                plain[5].weight.copy_(torch.eye(4))
            optimizer.add_param_group({"params": list(plain[5].parameters())})
            model = world.again(model)
        loss = mse(model(x), y)
        world.note(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}
