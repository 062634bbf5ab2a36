"""Two models that train against each other."""

from typing import Any

import torch
from torch import Tensor, nn, optim

from benchmarks.compatibility.case import Found, World, case

_NOISE = 8


def _generator() -> nn.Sequential:
    return nn.Sequential(nn.Linear(_NOISE, 32), nn.Tanh(), nn.Linear(32, 16))


def _critic() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))


def _real(x: Tensor) -> Tensor:
    return 0.5 * x + 1.0


def _source(world: World) -> torch.Generator:
    return torch.Generator().manual_seed(77 + world.rank)


def _play(world: World, *, is_adam: bool = False, stops: bool = False, fresh: bool = False) -> Found:
    """The loop of most tutorials: first the critic's step, then the generator's through the critic."""

    def make(model: nn.Module) -> optim.Optimizer:
        if is_adam:
            return optim.Adam(model.parameters(), 0.01, betas=(0.5, 0.999))
        return optim.SGD(model.parameters(), 0.05, momentum=0.5)

    plain, judge = _generator(), _critic()
    generator, of_generator = world.wrap(plain, make(plain))
    critic, of_critic = world.wrap(judge, make(judge))
    source = _source(world)
    fakes = []
    for x, _ in world.batches():
        real = _real(x)
        z = torch.randn(16, _NOISE, generator=source)
        fake = generator(z)
        of_critic.zero_grad()
        if stops:
            judge.requires_grad_(True)
        loss = nn.functional.softplus(-critic(real)).mean()
        loss = loss + nn.functional.softplus(critic(fake.detach())).mean()
        world.note(loss)
        loss.backward()
        of_critic.step()
        if stops:
            judge.requires_grad_(False)
        of_generator.zero_grad()
        if fresh:
            fake = generator(torch.randn(16, _NOISE, generator=source))
        against = nn.functional.softplus(-critic(fake)).mean()
        fakes.append(against.detach())
        against.backward()
        of_generator.step()
    judge.requires_grad_(True)
    return {
        "generator": generator,
        "critic": critic,
        "of_generator": of_generator,
        "of_critic": of_critic,
        "fakes": fakes,
    }


@case("GAN, two models, two optimizers", falls=False)
def gan(world: World) -> Found:
    return _play(world)


@case("GAN, Adam", falls=False)
def gan_adam(world: World) -> Found:
    return _play(world, is_adam=True)


@case("GAN, the critic frozen in the generator's step", falls=False)
def gan_frozen(world: World) -> Found:
    return _play(world, stops=True)


@case("WGAN, five steps of the critic, weights clamped", falls=False)
def wgan(world: World) -> Found:
    plain, judge = _generator(), _critic()
    generator, of_generator = world.wrap(plain, optim.RMSprop(plain.parameters(), 0.003))
    critic, of_critic = world.wrap(judge, optim.RMSprop(judge.parameters(), 0.003))
    source = _source(world)
    for step, (x, _) in enumerate(world.batches(30)):
        with torch.no_grad():
            fake = generator(torch.randn(16, _NOISE, generator=source))
        of_critic.zero_grad()
        loss = critic(fake).mean() - critic(_real(x)).mean()
        world.note(loss)
        loss.backward()
        of_critic.step()
        with torch.no_grad():
            for parameter in judge.parameters():
                parameter.clamp_(-0.1, 0.1)
        if step % 5 == 4:
            of_generator.zero_grad()
            (-critic(generator(torch.randn(16, _NOISE, generator=source))).mean()).backward()
            of_generator.step()
    return {"generator": generator, "critic": critic}


@case("WGAN, gradient penalty", falls=False)
def wgan_penalty(world: World) -> Found:
    plain, judge = _generator(), _critic()
    generator, of_generator = world.wrap(plain, optim.Adam(plain.parameters(), 0.003, betas=(0.0, 0.9)))
    critic, of_critic = world.wrap(judge, optim.Adam(judge.parameters(), 0.003, betas=(0.0, 0.9)))
    source = _source(world)
    for step, (x, _) in enumerate(world.batches()):
        real = _real(x)
        with torch.no_grad():
            fake = generator(torch.randn(16, _NOISE, generator=source))
        mix = torch.rand(16, 1, generator=source)
        between = (mix * real + (1 - mix) * fake).requires_grad_()
        (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        of_critic.zero_grad()
        loss = critic(fake).mean() - critic(real).mean() + ((slope.norm(2, 1) - 1) ** 2).mean()
        world.note(loss)
        loss.backward()
        of_critic.step()
        if step % 2:
            of_generator.zero_grad()
            (-critic(generator(torch.randn(16, _NOISE, generator=source))).mean()).backward()
            of_generator.step()
    return {"generator": generator, "critic": critic}


@case("two models, one optimizer", modes=("wrap-model",), falls=False)
def one_optimizer(world: World) -> Found:
    """Encoder and decoder, each wrapped, under one Adam."""
    encoder, decoder = world.model(nn.Linear(16, 8)), world.model(nn.Linear(8, 16))
    optimizer = optim.Adam([*encoder.parameters(), *decoder.parameters()], 0.01)
    for x, _ in world.batches():
        loss = nn.functional.mse_loss(decoder(encoder(x).tanh()), x)
        world.note(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"encoder": encoder, "decoder": decoder, "optimizer": optimizer}


@case("a student, and a teacher that only the first worker trained")
def distilled(world: World) -> Found:
    """The teacher is not wrapped: every worker loads it from the first one's file."""
    from benchmarks.compatibility.cases.basics import mse, net

    teacher, path = net(), world.folder / "teacher.pt"
    if world.rank == 0:
        with torch.no_grad():
            for parameter in teacher.parameters():
                parameter.mul_(1.5)
        torch.save(teacher.state_dict(), path)
    world.meet()
    teacher.load_state_dict(torch.load(path, weights_only=True))
    student: Any = net()
    student, optimizer = world.wrap(student, optim.Adam(student.parameters(), 0.01))
    for x, _ in world.batches():
        with torch.no_grad():
            wanted = teacher(x)
        loss = mse(student(x), wanted)
        world.note(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": student, "optimizer": optimizer}
