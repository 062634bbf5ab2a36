"""`wrap`: join the run with a model and its optimizer."""

import time
from dataclasses import dataclass
from typing import Literal, TypeVar

import msgspec
import numpy as np
import torch
from torch import nn

from shoestring.checkpoint.saver import Saver
from shoestring.checkpoint.schedule import schedule_for
from shoestring.checkpoint.snapshot import Snapshot
from shoestring.codec.base import Vector
from shoestring.codec.registry import make
from shoestring.codec.warmup import warm_up_dct
from shoestring.errors import UsageError
from shoestring.model.layers import Layer
from shoestring.model.parts import assign
from shoestring.model.rules import Rule
from shoestring.model.table import Table
from shoestring.wire import messages as say
from shoestring.worker import session
from shoestring.worker.batchnorm.layers import SharedBatchNorm, shared_layers
from shoestring.worker.batchnorm.statistics import SharedStatistics, warm_up_statistics
from shoestring.worker.capture import ScriptCapture, make_saver
from shoestring.worker.coder import PartCoder
from shoestring.worker.exchange import Exchange
from shoestring.worker.memory import SharedMemory
from shoestring.worker.optimizer import SharedOptimizer
from shoestring.worker.optimizers import hyper_of, rule_of
from shoestring.worker.protocol.joining import Identity
from shoestring.worker.protocol.worker import Answer, Worker
from shoestring.worker.replica import Replica
from shoestring.worker.reporter import Reporter
from shoestring.worker.rounds.auto import AUTO, Auto
from shoestring.worker.rounds.differences import DifferenceRounds
from shoestring.worker.rounds.gradients import GradientRounds
from shoestring.worker.rounds.pilot import Pilot
from shoestring.worker.rounds.policy import (
    Async,
    Bounded,
    EveryStep,
    LocalSteps,
    Policy,
    make_policy,
    text_of,
)
from shoestring.worker.session import Session

Model = TypeVar("Model", bound=nn.Module)


def wrap(
    model: Model,
    optimizer: torch.optim.Optimizer,
    *,
    codec: str | None = None,
    policy: str | Policy | None = None,
    clip_norm: float = 0.0,
    overlap: bool = True,
    batch: Literal["even", "auto"] = "even",
) -> tuple[Model, SharedOptimizer]:
    """Train this model together with the other workers of the run.

    Returns the same model, with a `no_sync()` context for gradient accumulation, and an
    optimizer to use in place of the one given. All workers start from the first
    worker's parameters. `codec` and `policy` take the place of the run's settings.
    `clip_norm` clips the mean gradient by its norm over all parameters. `overlap=False`
    sends gradients at `step()` instead of during backward, for code that changes them
    in between. `batch="auto"` moves samples from slow workers to fast ones, where batches come
    from `shoestring.batches(data, global_batch=...)`.
    """
    return join(
        session.current(),
        model,
        optimizer,
        codec=codec,
        policy=policy,
        clip_norm=clip_norm,
        overlap=overlap,
        batch=batch,
    )


def join(
    here: Session,
    model: Model,
    optimizer: torch.optim.Optimizer,
    *,
    codec: str | None,
    policy: str | Policy | None,
    clip_norm: float = 0.0,
    overlap: bool = True,
    batch: str = "even",
) -> tuple[Model, SharedOptimizer]:
    """Do what `wrap` says, for a session that is given."""
    policy = make_policy(policy or here.run.policy or EveryStep())
    codec = codec or here.run.codec or AUTO
    _check(optimizer, codec, policy, clip_norm, batch)
    built = _build(here, model, optimizer, codec, policy, clip_norm)
    entry = _enter(here, built)
    saver = _resume(here, model, optimizer, built, entry)
    driver, pilot = _drive(
        here, optimizer, built, entry, codec=codec, policy=policy, overlap=overlap, is_auto=batch == "auto"
    )
    reporter = Reporter(here, entry.exchange, entry.coder, pilot)
    if saver is not None:
        here.closers.append(saver.close)
    here.closers.append(reporter.close)
    _watch_passes(here, model, driver)
    # Past `nn.Module`'s own, which is for parameters and submodules.
    object.__setattr__(model, "no_sync", driver.no_sync)
    return model, SharedOptimizer(optimizer, driver, saver, reporter)


@dataclass(frozen=True)
class _Built:
    """What a run is to train, before anyone else has heard of it."""

    replica: Replica
    table: Table
    statistics: SharedStatistics
    clip_norm: float
    is_local: bool  # the optimizer works on the worker
    is_whole: bool  # every push is part of a round of all workers


@dataclass(frozen=True)
class _Entry:
    """This worker's place among the shards."""

    exchange: Exchange
    coder: PartCoder
    homes: tuple[int, ...]  # the shard of each part
    shards: int
    first_round: int
    parts: list[say.Full]  # as they came from the shards
    agreed: dict[int, Vector]  # values of parts of which the replica holds less, where the worker needs them


def _build(
    here: Session,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    codec: str,
    policy: Policy,
    clip_norm: float,
) -> _Built:
    """Describe the model as workers and shards know it, and have kernels ready."""
    replica = Replica(model, optimizer)
    named = list(shared_layers(model))
    layers = _layers(named, model, replica)
    table = Table(
        replica.tensors,
        _rule(optimizer, policy),
        len(optimizer.param_groups),
        clip_norm,
        layers,
        policy=text_of(policy),
    )
    is_local = isinstance(policy, LocalSteps)
    statistics = SharedStatistics(
        layers, [module for _, module in named], replica.parts, workers=here.run.workers, is_local=is_local
    )
    if codec.startswith("dct") or (codec == AUTO and not here.run.is_alone):
        warm_up_dct()  # before the exchange's thread must answer in time
    if layers and not here.run.is_alone:
        warm_up_statistics(module for _, module in named)
    is_whole = not isinstance(policy, Bounded | Async)
    return _Built(replica, table, statistics, clip_norm, is_local, is_whole)


def _enter(here: Session, built: _Built) -> _Entry:
    """Join all shards; afterwards the replica holds what they hold."""
    run, replica = here.run, built.replica
    sockets = here.connect()
    addresses = [address for address, _ in sockets]
    homes = assign(replica.parts, len(sockets))
    sizes = [part.size for part in replica.parts]
    memory = SharedMemory(addresses, homes, sizes)

    def protocol(now: float) -> Worker:
        return Worker(
            Identity(run.name, run.worker, run.workers, here.life, run.incarnation),
            memoryview(msgspec.msgpack.encode(built.table)),
            homes,
            sizes,
            addresses,
            initial=lambda part: replica.read(replica.parts[part]).view(np.uint8).data,
            memory=memory,
            clip_norm=built.clip_norm,
            timeout_s=run.timeout_s,
            join_timeout_s=run.join_timeout_s,
            ask_after_s=run.ask_after_s,
            now=now,
        )

    exchange = Exchange(sockets, sizes, protocol, memory, notice=here.notice)
    here.closers.append(exchange.close)
    came: list[say.Full] = []
    agreed: dict[int, Vector] = {}

    def take(answer: Answer) -> None:
        precision = replica.precisions[answer.part]
        values = precision.unpack(answer.payload).copy()
        replica.write(replica.parts[answer.part], values)
        if built.is_local and precision.is_narrow:
            agreed[answer.part] = values
        if isinstance(answer.message, say.Full):
            came.append(answer.message)

    first_round = exchange.enter(take)
    coder = PartCoder(
        exchange, replica.parts, built.statistics, notice=here.notice, precisions=replica.precisions
    )
    return _Entry(exchange, coder, homes, len(sockets), first_round, came, agreed)


def _resume(
    here: Session, model: nn.Module, optimizer: torch.optim.Optimizer, built: _Built, entry: _Entry
) -> Saver | None:
    """Go on from the run's checkpoint, if it has one, and from the statistics that the shards hold."""
    capture = ScriptCapture(here, model, optimizer, entry.coder, built.table, is_local=built.is_local)
    if here.run.resume is not None:
        capture.restore(Snapshot(here.run.resume))
    for full in entry.parts:
        built.statistics.hear(full.part, full.version, 0, full.statistics, is_whole=built.is_whole)
    return make_saver(here, capture, entry.exchange, shards=len(set(entry.homes)))


def _drive(
    here: Session,
    optimizer: torch.optim.Optimizer,
    built: _Built,
    entry: _Entry,
    *,
    codec: str,
    policy: Policy,
    overlap: bool,
    is_auto: bool,
) -> tuple[GradientRounds | DifferenceRounds, Pilot]:
    """Make what turns the script's steps into rounds, as the policy says."""
    here.sharing.is_auto = is_auto
    delay = policy.delay if isinstance(policy, EveryStep) else 0
    auto = None
    if codec == AUTO:
        auto = Auto(
            entry.exchange,
            _loads(entry, built.replica),
            len(entry.homes),
            free_delay=delay is None,
            explain=here.explain,
        )
        auto.start(time.monotonic())
    pilot = Pilot(
        codec if auto is None else auto,
        is_first=here.run.worker == 0,
        warmup=policy.warmup,
        delay=delay or 0,
        schedule=schedule_for(here.run.checkpoint, here.run.every),
        sharing=here.sharing,
    )
    if isinstance(policy, LocalSteps):
        return DifferenceRounds(
            built.replica,
            entry.coder,
            policy,
            pilot,
            inner=optimizer,
            first_round=entry.first_round,
            sharing=here.sharing,
            agreed=entry.agreed,
        ), pilot
    return GradientRounds(
        built.replica,
        entry.coder,
        policy,
        pilot,
        hyper=lambda: hyper_of(built.table.rule, optimizer.param_groups),
        first_round=entry.first_round,
        overlap=overlap,
        sharing=here.sharing,
    ), pilot


def _check(
    optimizer: torch.optim.Optimizer, codec: str, policy: Policy, clip_norm: float, batch: str
) -> None:
    if batch not in ("even", "auto"):
        raise UsageError(f'batch="{batch}"', hint='give "auto", or "even" for what the sampler says')
    if isinstance(optimizer, SharedOptimizer):
        raise UsageError("this optimizer is wrapped already", hint="call `wrap` once for each model")
    if clip_norm < 0 or (clip_norm and not isinstance(policy, EveryStep)):
        raise UsageError(
            f"clip_norm={clip_norm} with {policy}",
            hint="give a positive norm with `EveryStep`; with other policies clip on the worker",
        )
    if codec != AUTO:
        make(codec)


def _rule(optimizer: torch.optim.Optimizer, policy: Policy) -> Rule:
    if not isinstance(policy, LocalSteps):
        return rule_of(optimizer)
    return Rule("outer_nesterov") if policy.outer == "nesterov" else Rule("average")


def _layers(
    named: list[tuple[str, SharedBatchNorm]], model: nn.Module, replica: Replica
) -> tuple[Layer, ...]:
    """The shared layers as the shards know them.

    A layer's statistics go with its weight: when that has its gradient, the layer's backward is
    over. Where the weight is not trained, with the parameter before it, whose gradient comes later.
    """
    places = {parameter: index for index, parameter in enumerate(replica.parameters)}
    layers, last = [], 0
    modules = {module: name for name, module in named}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            last = places.get(parameter, last)
        if isinstance(module, SharedBatchNorm):
            place = places.get(module.weight, last) if module.affine else last
            layers.append(Layer(modules[module], module.num_features, place, 1 - 1 / module.horizon))
    return tuple(layers)


def _loads(entry: _Entry, replica: Replica) -> list[int]:
    """How many values each shard holds."""
    loads = [0] * entry.shards
    for home, part in zip(entry.homes, replica.parts, strict=True):
        loads[home] += part.size
    return loads


def _watch_passes(here: Session, model: nn.Module, driver: GradientRounds | DifferenceRounds) -> None:
    """Count training passes, by which a resumed run finds its place in the data; let local steps go on."""

    def begin(module: nn.Module, _: object) -> None:
        if module.training and torch.is_grad_enabled():
            here.forwards += 1
            if isinstance(driver, DifferenceRounds):
                driver.go_on()

    model.register_forward_pre_hook(begin)
