"""hivemind as a contestant: parameters averaged among all hosts every so many steps.

All hosts call its `TrainingAverager` after the same step, and a round is one that all of them
take part in: one that fails ends the training. A group that is full begins at once, so that
matchmaking takes fractions of a second. (hivemind's `Optimizer` averages through the same code,
but chooses the moment by itself, from what it hears of the others' progress at most twice a
second: its rounds come after no fixed number of steps, and hosts do not end with one.)

Replicas agree after a round up to the rounding of what was sent: a host receives how far it
is from the mean, and adds that to what it has. With `uniform8` that rounding is coarse. All
hosts must start from the same parameters.
"""

import importlib.metadata
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from benchmarks.train.entrant import Place
from shoestring.cache.patience import attempts
from shoestring.errors import ShoestringError, UsageError

_PATIENCE_S = 600.0  # links are slow, and many hosts share few cores
_MEET_S = 120.0
_LOOK_S = 0.05
_COMPRESSIONS = {
    "none": "NoCompression",
    "float16": "Float16Compression",
    "uniform8": "Uniform8BitQuantization",
}


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What can be chosen."""

    sync_every: int = 20
    compression: str = "float16"
    matchmaking_s: float = 3.0  # hosts are expected within it; a full group begins at once


def read_options(options: dict[str, Any]) -> Options:
    """Check what was asked for."""
    try:
        chosen = msgspec.convert(options, Options)
    except msgspec.ValidationError as error:
        raise UsageError(
            f"hivemind cannot be run with `{options}`: {error}",
            hint="give `sync_every`, `compression` and `matchmaking_s`, or leave them out",
        ) from None
    if chosen.compression not in _COMPRESSIONS:
        raise UsageError(
            f"hivemind has no compression `{chosen.compression}` here",
            hint=f"choose one of {', '.join(f'`{name}`' for name in _COMPRESSIONS)}",
        )
    if chosen.sync_every < 1:
        raise UsageError(
            f"`sync_every` is {chosen.sync_every}, but a round comes after one step or more",
            hint="choose 1 or more",
        )
    if not 0 < chosen.matchmaking_s < _PATIENCE_S:
        raise UsageError(
            f"`matchmaking_s` is {chosen.matchmaking_s:g}, which hosts cannot meet in",
            hint=f"choose more than 0 and less than {_PATIENCE_S:g}; hivemind advises 3 to 5",
        )
    return chosen


class HivemindEntrant:
    """One host's replica, with hivemind's own processes beside it."""

    def __init__(
        self, place: Place, model: nn.Module, optimizer: torch.optim.Optimizer, options: Options
    ) -> None:
        import hivemind
        import hivemind.compression

        self.model = model
        self._optimizer = optimizer
        self._options = options
        self._place = place
        self._steps = 0
        self._rounds = 0
        self._dht = _join_dht(place)
        try:
            compression = getattr(hivemind.compression, _COMPRESSIONS[options.compression])
            self._averager = hivemind.TrainingAverager(
                optimizer,
                average_parameters=True,
                average_gradients=False,
                initialize_optimizer=False,
                dht=self._dht,
                prefix="shoestring_bench",
                target_group_size=place.hosts,
                min_group_size=place.hosts,
                min_matchmaking_time=options.matchmaking_s,
                # hivemind's advice: less than the time for matchmaking, or hosts may block each other.
                request_timeout=0.6 * options.matchmaking_s,
                allreduce_timeout=_PATIENCE_S,
                compression=compression(),
                start=True,
            )
        except BaseException:
            self._dht.shutdown()
            raise

    def step(self) -> None:
        self._optimizer.step()
        self._steps += 1
        if self._steps % self._options.sync_every == 0:
            self._average()

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()

    def facts(self) -> dict[str, Any]:
        return {
            "version": importlib.metadata.version("hivemind"),
            "kind": "parameters",
            "sync_every": self._options.sync_every,
            "compression": self._options.compression,
            "matchmaking_s": self._options.matchmaking_s,
            "rounds": self._rounds,
        }

    def close(self) -> None:
        # A host that is through may still have to send the others their last part.
        mark = self._place.folder / f"hivemind-{self._place.host}.done"
        mark.touch()
        try:
            for host in range(self._place.hosts):
                _wait_for(mark.with_name(f"hivemind-{host}.done"), f"host {host} to end")
        finally:
            self._averager.shutdown()
            self._dht.shutdown()

    def _average(self) -> None:
        try:
            members = self._averager.step(timeout=_PATIENCE_S)
        except Exception as error:
            raise ShoestringError(
                f"hivemind's round {self._rounds + 1} failed: {error!r}",
                hint="look for hivemind's own messages above",
            ) from error
        if members is None or len(members) != self._place.hosts:
            raise ShoestringError(
                f"hivemind's round {self._rounds + 1} had {len(members or ())} hosts "
                f"instead of {self._place.hosts}",
                hint="give `matchmaking_s` more time",
            )
        self._rounds += 1


def enter(
    place: Place, model: nn.Module, optimizer: torch.optim.Optimizer, options: dict[str, Any]
) -> HivemindEntrant:
    """Join with this host's model, which its optimizer updates."""
    chosen = read_options(options)
    if place.hosts < 2:
        raise UsageError("hivemind averages among two hosts or more", hint="give it more hosts")
    try:
        import hivemind  # noqa: F401
    except ModuleNotFoundError as error:
        raise UsageError(
            f"hivemind cannot be imported: there is no module `{error.name}`",
            hint="build the environment of the other libraries with `make peers`, and train in it",
        ) from None
    return HivemindEntrant(place, model, optimizer, chosen)


def _join_dht(place: Place) -> Any:
    """Start this host's node of hivemind's table. The others find it through host 0's."""
    import hivemind

    note = place.folder / "hivemind-peer"
    listen = f"/ip4/{place.addresses[place.host]}/tcp/{place.port + place.host}"
    peers = [] if place.host == 0 else [_wait_for(note, "host 0 to start").read_text()]
    dht = hivemind.DHT(
        initial_peers=peers,
        host_maddrs=[listen],
        start=True,
        startup_timeout=_MEET_S,
        # What leads through a router and relays to hosts behind one; here all are reachable.
        auto_nat=False,
        nat_port_map=False,
        use_relay=False,
    )
    if place.host == 0:
        part = note.with_suffix(".part")
        part.write_text(f"{listen}/p2p/{dht.peer_id}")
        part.replace(note)
    return dht


def _wait_for(file: Path, what: str) -> Path:
    for _ in attempts(_MEET_S, _LOOK_S):
        if file.exists():
            return file
    raise ShoestringError(f"waited {_MEET_S:g} s in vain for {what}", hint="look at what that host said last")
