"""`wrap`: join the run with a model, and with its optimizer if the shards are to update the parameters."""

import time
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from shoestring.checkpoint.saver import Saver
from shoestring.checkpoint.schedule import schedule_for
from shoestring.checkpoint.snapshot import Snapshot
from shoestring.codec.base import Vector
from shoestring.codec.dct.codec import Dct
from shoestring.codec.registry import make
from shoestring.codec.warmup import prepare_dct
from shoestring.errors import UsageError, WireError
from shoestring.model.layers import Layer
from shoestring.model.rules import Rule
from shoestring.model.table import Table
from shoestring.model.vectors import PARAMS, pack
from shoestring.wire import messages as say
from shoestring.worker.alike import align, untaken
from shoestring.worker.asked import (
    Asked,
    Optimizers,
    check,
    check_growth,
    check_means,
    is_lossless,
    rule_for,
    say_what_differs,
    settle,
    settled,
    why_on_workers,
)
from shoestring.worker.batchnorm.layers import SharedBatchNorm, shared_layers
from shoestring.worker.batchnorm.statistics import SharedStatistics, warm_up_statistics
from shoestring.worker.capture import ScriptCapture, make_saver
from shoestring.worker.coder import PartCoder
from shoestring.worker.entry import Entry, enter
from shoestring.worker.module import shell
from shoestring.worker.module.buffers import SharedBuffers
from shoestring.worker.module.fingerprint import fingerprint
from shoestring.worker.module.growth import Growing, Rounds, trainable
from shoestring.worker.optimizer import SharedOptimizer
from shoestring.worker.optimizers import hyper_of
from shoestring.worker.protocol.worker import Answer
from shoestring.worker.replica.replica import Replica
from shoestring.worker.reporter import Reporter
from shoestring.worker.rounds.auto import AUTO, Auto
from shoestring.worker.rounds.chooser import Chooser
from shoestring.worker.rounds.differences import DifferenceRounds
from shoestring.worker.rounds.gradients import GradientRounds
from shoestring.worker.rounds.meancoder import MeanCoder
from shoestring.worker.rounds.means import LoneRounds, MeanRounds
from shoestring.worker.rounds.pilot import Pilot
from shoestring.worker.rounds.policy import (
    Async,
    Bounded,
    EveryStep,
    LocalSteps,
    Policy,
    make_policy,
)
from shoestring.worker.rounds.state import ShardState
from shoestring.worker.rounds.witness import Watch
from shoestring.worker.session import Session
from shoestring.worker.trial import Trial

_MEAN = Rule("mean")


def join(
    here: Session,
    model: Any,
    optimizer: Optimizers | None = None,
    *,
    codec: str | None = None,
    policy: str | Policy | None = None,
    clip_norm: float = 0.0,
    batch: str = "even",
    broadcast_buffers: bool = True,
) -> Any:
    """Do what `wrap` says, for a session that is given."""
    codec = codec or here.run.codec or AUTO
    inner = shell.bare(model)
    given = make_policy(policy or here.run.policy or EveryStep())
    asked = Asked(codec, EveryStep(), clip_norm, batch == "auto", broadcast_buffers)
    asked = settle(here, inner, optimizer, asked, given)
    check(optimizer, asked, batch)
    outer = inner if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel) else model
    why = why_on_workers(inner, optimizer, asked.policy)
    if not isinstance(optimizer, torch.optim.Optimizer) or why:
        check_means(asked.policy, clip_norm, f": {why}" if why else " (`wrap(model)`)")
        if why:
            here.notice(f"the optimizer runs on the workers, on the mean gradient: {why}")
        _join_means(here, inner, asked)
        return outer if optimizer is None else (outer, optimizer)
    say_what_differs(here, asked.policy)
    return outer, _join_shards(here, inner, optimizer, asked)


@dataclass(frozen=True)
class _Built:
    """What a run is to train, before anyone else has heard of it."""

    replica: Replica
    table: Table
    statistics: SharedStatistics
    buffers: SharedBuffers | None
    is_more: bool  # these are parameters that were not trained when the model was wrapped


def _join_shards(
    here: Session, model: nn.Module, optimizer: torch.optim.Optimizer, asked: Asked
) -> SharedOptimizer:
    """Join with the update on the shards, or after local steps."""
    if here.models and here.run.checkpoint is not None:
        raise UsageError(
            f"a second model, and checkpoints in `{here.run.checkpoint}`, which hold one",
            hint="leave `--checkpoint` out, and save with `torch.save` as you would with DDP",
        )
    driver, saver = _shard_rounds(here, model, optimizer, asked)
    drivers = [driver]

    def more(new: set[nn.Parameter]) -> Rounds:
        check_growth(here, model, asked, new)
        drivers.append(_shard_rounds(here, model, optimizer, asked, new)[0])
        return drivers[-1]

    def trained() -> set[nn.Parameter]:
        held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        if any(parameter.requires_grad for parameter in held - set(model.parameters())):
            raise UsageError(
                "the optimizer was given parameters that the wrapped model has not",
                hint="make them the model's, or leave them to an optimizer of their own; load values without "
                "`assign=True`, or before `wrap`",
            )
        return trainable(model) & held

    growing = Growing(model, driver, more, trained)

    def change(to: say.PolicyChange) -> DifferenceRounds | None:
        if growing.is_grown:  # local steps do not take such parameters in
            return None
        new = _change(here, model, optimizer, asked, drivers[0], to)
        drivers[:] = [new]
        growing.go_on_with(new)
        return new

    _put_on(here, model, growing)
    return SharedOptimizer(optimizer, drivers, saver, here.reporter, growing.take_in, change)


def _change(
    here: Session,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    asked: Asked,
    old: GradientRounds | DifferenceRounds,
    to: say.PolicyChange,
) -> DifferenceRounds:
    """Go on with local steps: the optimizer's state comes from the shards to stay, and a new model is joined.

    The old one is left only then: shards end with the last worker that is there.
    """
    if old.state is not None:
        old.state.hand_over()
    chosen = make_policy(to.policy)
    if not isinstance(chosen, LocalSteps):
        raise WireError(f"a change to policy `{to.policy}`", hint="check both sides' versions")
    local = replace(asked, policy=settled(chosen, optimizer), codec=to.codec, auto=None)
    new, _ = _shard_rounds(here, model, optimizer, local, before=old.steps)
    assert isinstance(new, DifferenceRounds)
    if isinstance(old, GradientRounds):
        old.close()
    here.reporter.move(new.coder.exchange, new.coder, new.pilot)
    here.closers.remove(here.reporter.close)
    here.closers.append(here.reporter.close)  # it has to tell of the last steps before the worker leaves
    old.coder.exchange.close(moved=to.policy)
    return new


def _shard_rounds(
    here: Session,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    asked: Asked,
    only: set[nn.Parameter] | None = None,
    before: int = 0,
) -> tuple[GradientRounds | DifferenceRounds, Saver | None]:
    """Join the run with a model's parameters, or only some of them, and their optimizer.

    `before`: how many steps were taken with another policy.
    """
    built = _build(here, model, optimizer, rule_for(optimizer, asked.policy), asked, only)
    is_local = isinstance(asked.policy, LocalSteps)
    state = ShardState(optimizer, built.replica, built.table.rule)
    entry, parts, agreed = _enter(here, model, built, state=None if is_local else state, is_local=is_local)
    coder = PartCoder(
        entry.exchange,
        built.replica.parts,
        built.statistics,
        notice=here.notice,
        precisions=built.replica.precisions,
        buffers=built.buffers,
        keeps=built.table.rule.keeps,
    )
    saver = None if only else _resume(here, model, optimizer, built, entry, parts, coder, asked.policy)
    pilot = _pilot(here, built, entry, asked)
    driver = _drive(here, optimizer, built, entry, coder, pilot, asked.policy, state, agreed, before)
    here.report_to(Reporter, entry.exchange, coder, pilot)
    if isinstance(driver, GradientRounds):
        here.closers.append(driver.close)
    if saver is not None:
        here.closers.append(saver.close)
    return driver, saver


def _join_means(here: Session, model: nn.Module, asked: Asked) -> None:
    """Join for the mean gradient alone."""
    if here.run.checkpoint is not None:
        raise UsageError(
            f"checkpoints in `{here.run.checkpoint}`, but the script keeps its optimizer to itself",
            hint="save with `torch.save` as you would with DDP, without `--checkpoint`; or let the shards "
            "update: `model, optimizer = shoestring.wrap(model, optimizer)`",
        )
    if here.run.is_alone:  # what one worker has is the mean
        _put_on(here, model, LoneRounds())
        return
    rounds = _mean_rounds(here, model, asked)
    trial = Trial()
    rounds.on_round.append(here.reporter.round_done)
    rounds.on_round.append(trial.step_begins)
    _put_on(here, model, Growing(model, rounds, lambda new: _mean_rounds(here, model, asked, new)))


def _mean_rounds(
    here: Session, model: nn.Module, asked: Asked, only: set[nn.Parameter] | None = None
) -> MeanRounds:
    """Join the run with a model's parameters, or only some of them, for their mean gradient."""
    built = _build(here, model, None, _MEAN, asked, only)
    if any(row.dtype == "float64" for row in built.table.tensors) and not is_lossless(asked.codec):
        here.notice('gradients of float64 parameters travel as float32; in float64 with `codec="float32"`')
    entry, *_ = _enter(here, model, built)
    coder = MeanCoder(
        entry.exchange, built.replica.parts, built.statistics, notice=here.notice, buffers=built.buffers
    )
    pilot = _pilot(here, built, entry, asked)
    rounds = MeanRounds(
        built.replica,
        coder,
        pilot,
        is_whole=is_lossless(asked.codec),
        first_round=entry.first_round,
        sharing=here.sharing,
    )
    here.closers.append(rounds.close)
    here.report_to(Reporter, entry.exchange, coder, pilot)
    return rounds


def _build(
    here: Session,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    rule: Rule,
    asked: Asked,
    only: set[nn.Parameter] | None = None,
) -> _Built:
    """Describe the model, or only some of its parameters, as workers and shards know it."""
    replica = Replica(model, optimizer, only)
    named = list(shared_layers(model)) if only is None else []
    layers = _layers(named, model, replica)
    groups = 1 if optimizer is None else len(optimizer.param_groups)
    table = Table(replica.tensors, rule, groups, asked.clip_norm, layers, policy=asked.text)
    statistics = SharedStatistics(
        layers,
        [module for _, module in named],
        replica.parts,
        workers=here.run.workers,
        is_local=isinstance(asked.policy, LocalSteps),
    )
    if asked.codec != AUTO:
        _prepare(here, replica, asked.codec)
    if layers and not here.run.is_alone:
        warm_up_statistics(module for _, module in named)
    buffers = None
    if here.run.workers > 1 and asked.follows_buffers and only is None:
        buffers = SharedBuffers(model, replica, is_first=here.run.worker == 0)
    return _Built(replica, table, statistics, buffers, is_more=only is not None)


def _prepare(here: Session, replica: Replica, spec: str) -> None:
    """Have a codec's kernels loaded, before the exchange's thread must answer in time."""
    codec = make(spec)
    if isinstance(codec, Dct):
        prepare_dct((part.layout for part in replica.parts), codec.options, here.notice)


def _enter(
    here: Session,
    model: nn.Module,
    built: _Built,
    *,
    state: ShardState | None = None,
    is_local: bool = False,
) -> tuple[Entry, list[say.Full], dict[int, Vector]]:
    """Join all shards; afterwards every worker's model is the first one's, or what the shards hold.

    Returns the parts as they came, too; and for local steps the values of those that the replica rounds.
    """
    replica, is_mean = built.replica, built.table.rule == _MEAN
    came: list[say.Full] = []
    before = {} if state is None else state.initial()  # of the optimizer
    agreed: dict[int, Vector] = {}

    def initial(index: int) -> memoryview:
        part = replica.parts[index]
        if is_mean:
            return memoryview(b"")
        return pack({PARAMS: replica.read(part), **(state.vectors(part, before) if state and before else {})})

    def take(answer: Answer) -> None:
        if not is_mean:
            precision = replica.precisions[answer.part]
            values = precision.unpack(answer.payload).copy()
            replica.write(replica.parts[answer.part], values)
            if is_local and precision.is_narrow:
                agreed[answer.part] = values
        if isinstance(answer.message, say.Full):
            came.append(answer.message)

    names = (PARAMS, *(state.names if state and before else ()))
    entry = enter(
        here, here.next_model(), built.table, replica.parts, initial=initial, names=names, take=take
    )
    used, values = len(set(entry.homes)), sum(part.size for part in replica.parts)
    if used < entry.shards and here.run.worker == 0 and not built.is_more:
        here.notice(f"a model of {values:,} parameters uses {used} of {entry.shards} shards")
    if entry.first_round == 1:  # later, a checkpoint or the rounds bring it
        align(here, entry.model, _given(model, built))
    return entry, came, agreed


def _given(model: nn.Module, built: _Built) -> dict[str, torch.Tensor]:
    """What workers take from the first one before the first round, but not through the shards."""
    if built.is_more:
        return dict(zip((row.name for row in built.replica.tensors), built.replica.parameters, strict=True))
    return untaken(model, () if built.table.rule == _MEAN else built.replica.parameters)


def _resume(
    here: Session,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    built: _Built,
    entry: Entry,
    parts: list[say.Full],
    coder: PartCoder,
    policy: Policy,
) -> Saver | None:
    """Go on from the run's checkpoint, if it has one, and from the statistics that the shards hold."""
    is_local = isinstance(policy, LocalSteps)
    capture = ScriptCapture(here, model, optimizer, coder, built.table, is_local=is_local)
    if here.run.resume is not None:
        capture.restore(Snapshot(here.run.resume))
    is_whole = not isinstance(policy, Bounded | Async)
    for full in parts:
        built.statistics.hear(full.part, full.version, 0, full.statistics, is_whole=is_whole)
    return make_saver(here, capture, entry.exchange, shards=len(set(entry.homes)))


def _pilot(here: Session, built: _Built, entry: Entry, asked: Asked) -> Pilot:
    """Make what chooses codec, delay and shares of each round."""
    here.sharing.is_auto = asked.is_auto_batch
    delay = asked.policy.delay if isinstance(asked.policy, EveryStep) else 0
    auto = None
    if asked.codec == AUTO:
        auto = Auto(
            entry.exchange,
            entry.loads(built.replica.parts),
            len(entry.homes),
            free_delay=delay is None and built.table.rule != _MEAN,
            explain=here.explain,
            prepare=partial(_prepare, here, built.replica),
        )
        auto.start(time.monotonic())
    chooser = None
    if asked.auto is not None and auto is not None:
        chooser = Chooser(asked.auto, auto.outlook, here.notice)
    return Pilot(
        asked.codec if auto is None else auto,
        is_first=here.run.worker == 0,
        warmup=asked.policy.warmup,
        delay=delay or 0,
        schedule=schedule_for(here.run.checkpoint, here.run.every),
        sharing=here.sharing,
        watch=_watch(here, built),
        chooser=chooser,
    )


def _watch(here: Session, built: _Built) -> Watch | None:
    """Make what finds equal batches, of the run's first model, and unequal parameters."""
    is_mean = built.table.rule == _MEAN
    if here.run.workers == 1:
        return None
    parameters = built.replica.parameters if is_mean else ()
    names = [row.name for row in built.table.tensors] if is_mean else ()
    watch = Watch(here.run.worker, here.notice, parameters, names)
    here.watch = here.watch or watch
    return watch


def _drive(
    here: Session,
    optimizer: torch.optim.Optimizer,
    built: _Built,
    entry: Entry,
    coder: PartCoder,
    pilot: Pilot,
    policy: Policy,
    state: ShardState,
    agreed: dict[int, Vector],
    before: int,
) -> GradientRounds | DifferenceRounds:
    """Make what turns the script's steps into rounds, as the policy says."""
    if isinstance(policy, LocalSteps):
        return DifferenceRounds(
            built.replica,
            coder,
            policy,
            pilot,
            inner=optimizer,
            first_round=entry.first_round,
            sharing=here.sharing,
            agreed=agreed,
            before=before,
        )
    rounds = GradientRounds(
        built.replica,
        coder,
        policy,
        pilot,
        hyper=lambda: hyper_of(built.table.rule, optimizer.param_groups[: built.table.groups]),
        state=state,
        is_first=here.run.worker == 0,
        first_round=entry.first_round,
        sharing=here.sharing,
    )
    state.connect(entry.exchange, rounds.shown_round)
    return rounds


def _put_on(here: Session, model: nn.Module, driver: shell.Driver) -> None:
    """Make the model a wrapped one. Training passes are counted: a resumed run finds its data by them."""

    def begins(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        here.forwards += 1
        if here.watch is not None and here.watch.is_looking:
            here.watch.show(fingerprint(args, kwargs))

    shell.put_on(model, driver, begins)


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
