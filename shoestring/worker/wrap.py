"""`wrap`: join the run with a model and its optimizer."""

import time
from typing import Literal, TypeVar

import torch
from torch import nn

from shoestring.checkpoint.schedule import schedule_for
from shoestring.checkpoint.snapshot import Snapshot
from shoestring.codec.registry import make
from shoestring.codec.warmup import warm_up_dct
from shoestring.errors import UsageError
from shoestring.model.layers import Layer
from shoestring.model.parts import assign
from shoestring.model.rules import Rule
from shoestring.model.table import Table
from shoestring.worker import session
from shoestring.worker.batchnorm.layers import SharedBatchNorm, shared_layers
from shoestring.worker.batchnorm.statistics import SharedStatistics, warm_up_statistics
from shoestring.worker.capture import ScriptCapture, make_saver
from shoestring.worker.courier import Courier
from shoestring.worker.exchange import Exchange
from shoestring.worker.join import Door
from shoestring.worker.optimizer import SharedOptimizer
from shoestring.worker.optimizers import hyper_of, rule_of
from shoestring.worker.replica import Replica
from shoestring.worker.reporter import Reporter
from shoestring.worker.rounds.auto import AUTO, Auto
from shoestring.worker.rounds.differences import DifferenceRounds
from shoestring.worker.rounds.gradients import GradientRounds
from shoestring.worker.rounds.pilot import Pilot
from shoestring.worker.rounds.policy import Async, Bounded, EveryStep, LocalSteps, Policy, make_policy
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
    here.sharing.is_auto = batch == "auto"
    replica = Replica(model, optimizer)
    named_layers = list(shared_layers(model))
    layers = _layers(named_layers, model, replica)
    table = Table(replica.tensors, _rule(optimizer, policy), len(optimizer.param_groups), clip_norm, layers)
    if codec.startswith("dct") or (codec == AUTO and not here.run.is_alone):
        warm_up_dct()  # before the exchange's thread must answer in time
    if layers and not here.run.is_alone:
        warm_up_statistics(module for _, module in named_layers)
    sockets = here.connect()
    homes = assign(replica.parts, len(sockets))
    entry = Door(here.run, here.incarnation, sockets, here.notice).enter(table, replica, homes)
    sizes = tuple(part.size for part in replica.parts)
    exchange = Exchange(
        sockets, homes, sizes, shared=entry.shared, clip_norm=clip_norm, timeout_s=here.run.timeout_s
    )
    here.closers.append(exchange.close)
    statistics = SharedStatistics(
        layers,
        [module for _, module in named_layers],
        replica.parts,
        workers=here.run.workers,
        is_local=isinstance(policy, LocalSteps),
    )
    courier = Courier(exchange, replica.parts, here.incarnation, statistics, notice=here.notice)
    capture = ScriptCapture(here, model, optimizer, courier, table, is_local=isinstance(policy, LocalSteps))
    if here.run.resume is not None:
        capture.restore(Snapshot(here.run.resume))
    saver = make_saver(here, capture, exchange, shards=len(set(homes)))
    for part, data in enumerate(entry.statistics):
        statistics.hear(part, entry.versions[part], 0, data, is_whole=not isinstance(policy, Bounded | Async))
    delay = policy.delay if isinstance(policy, EveryStep) else 0
    auto = Auto(
        exchange,
        _loads(homes, sizes, len(sockets)),
        len(sizes),
        free_delay=delay is None,
        explain=here.explain,
    )
    pilot = Pilot(
        auto if codec == AUTO else codec,
        is_first=here.run.worker == 0,
        warmup=policy.warmup,
        delay=delay or 0,
        schedule=schedule_for(here.run.checkpoint, here.run.every),
        sharing=here.sharing,
    )
    driver: GradientRounds | DifferenceRounds
    if isinstance(policy, LocalSteps):
        driver = DifferenceRounds(
            replica,
            courier,
            policy,
            pilot,
            inner=optimizer,
            first_round=entry.first_round,
            sharing=here.sharing,
        )
    else:
        driver = GradientRounds(
            replica,
            courier,
            policy,
            pilot,
            hyper=lambda: hyper_of(table.rule, optimizer.param_groups),
            first_round=entry.first_round,
            overlap=overlap,
            sharing=here.sharing,
        )
    exchange.start(entry.versions)
    if saver is not None:
        here.closers.append(saver.close)
    if codec == AUTO:
        auto.start(time.monotonic())
    reporter = Reporter(here, exchange, courier, pilot)
    here.closers.append(reporter.close)
    _watch_passes(here, model, driver)
    # Past `nn.Module`'s own, which is for parameters and submodules.
    object.__setattr__(model, "no_sync", driver.no_sync)
    return model, SharedOptimizer(optimizer, driver, saver, reporter)


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


def _loads(homes: tuple[int, ...], sizes: tuple[int, ...], shards: int) -> list[int]:
    """How many values each shard holds."""
    loads = [0] * shards
    for home, size in zip(homes, sizes, strict=True):
        loads[home] += size
    return loads


def _watch_passes(here: Session, model: nn.Module, driver: GradientRounds | DifferenceRounds) -> None:
    """Count training passes, by which a resumed run finds its place in the data; let local steps go on."""

    def begin(module: nn.Module, _: object) -> None:
        if module.training and torch.is_grad_enabled():
            here.forwards += 1
            if isinstance(driver, DifferenceRounds):
                driver.go_on()

    model.register_forward_pre_hook(begin)
