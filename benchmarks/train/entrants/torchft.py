"""torchft's DiLoCo and LocalSGD as contestants, over its own gloo groups.

Every host is a replica group of one rank, with a store and a manager of its own. The
lighthouse, where the groups meet, runs beside host 0. It waits for all hosts, so a sync is
one that all of them take part in; one that fails ends the training instead of being left out.

All hosts must start from the same parameters: none are sent at the start. What travels is
float32 (torchft's quantised mode needs Triton and would fall back to float32 without a word):
in DiLoCo as one bucket, which its option asks for; LocalSGD sends tensor by tensor.
"""

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from benchmarks.train.entrant import Place
from shoestring.errors import ShoestringError, UsageError
from shoestring.fleet.engine.confine import confined

_dist: Any = torch.distributed  # its types leave out some of its public names
_PATIENCE = timedelta(seconds=600)  # links are slow, and many hosts share few cores
_LEAVE_S = 10.0
_PORTS = 2  # a host: its store's and its manager's; the lighthouse's follows the last host's


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What can be chosen. The outer rule is DiLoCo's; `local` averages parameters."""

    kind: str = "diloco"
    sync_every: int = 20
    outer_lr: float = 0.7
    outer_momentum: float = 0.9


def read_options(options: dict[str, Any]) -> Options:
    """Check what was asked for."""
    try:
        chosen = msgspec.convert(options, Options)
    except msgspec.ValidationError as error:
        raise UsageError(
            f"torchft cannot be run with `{options}`: {error}",
            hint="give `kind`, `sync_every`, `outer_lr` and `outer_momentum`, or leave them out",
        ) from None
    if chosen.kind not in ("diloco", "local"):
        raise UsageError(
            f"torchft has no kind `{chosen.kind}` of training here", hint="choose `diloco` or `local`"
        )
    if chosen.sync_every < 1:
        raise UsageError(
            f"`sync_every` is {chosen.sync_every}, but a sync comes after one step or more",
            hint="choose 1 or more",
        )
    if chosen.kind == "diloco" and not (chosen.outer_lr > 0 and 0 < chosen.outer_momentum < 1):
        raise UsageError(
            f"DiLoCo's outer rule cannot use `outer_lr` {chosen.outer_lr} with "
            f"`outer_momentum` {chosen.outer_momentum}",
            hint="choose a rate above 0 and a momentum between 0 and 1, e.g. 0.7 and 0.9",
        )
    return chosen


class TorchftEntrant:
    """One host's replica. torchft hooks into the optimizer: its step syncs when one is due."""

    def __init__(
        self, place: Place, model: nn.Module, optimizer: torch.optim.Optimizer, options: Options
    ) -> None:
        import torchft
        from torchft.local_sgd import DiLoCo, LocalSGD

        self.model = model
        self._optimizer = optimizer
        self._options = options
        self._hosts = place.hosts
        self._steps = 0
        address = place.addresses[place.host]
        port = place.port + _PORTS * place.host  # hosts may be one machine
        # Gloo takes the card from here; its own guess is the card of the host's name.
        os.environ["GLOO_SOCKET_IFNAME"] = place.card
        self._lighthouse = _start_lighthouse(place) if place.host == 0 else None
        try:
            self._store = _dist.TCPStore(
                address, port, is_master=True, wait_for_workers=False, timeout=_PATIENCE
            )
            self._group = torchft.ProcessGroupGloo(timeout=_PATIENCE)
            # It would tell the others the host's name, which leads each of them to itself.
            invite = self._group.get_reconfigure_handle
            self._group.get_reconfigure_handle = lambda: _reachable(invite(), address)
            self._manager = torchft.Manager(
                pg=self._group,
                load_state_dict=self._load_state,
                state_dict=self._state,
                min_replica_size=place.hosts,
                use_async_quorum=False,
                timeout=_PATIENCE,
                quorum_timeout=_PATIENCE,
                connect_timeout=_PATIENCE,
                rank=0,
                world_size=1,
                store_addr=address,
                store_port=port,
                lighthouse_addr=f"http://{place.addresses[0]}:{_lighthouse_port(place)}",
                replica_id=f"host_{place.host}",
                port=port + 1,
                hostname=address,
                init_sync=False,
                max_retries=0,
            )
            if options.kind == "local":
                self._rule = LocalSGD(self._manager, model, optimizer, options.sync_every)
            else:
                outer = torch.optim.SGD(
                    model.parameters(), lr=options.outer_lr, momentum=options.outer_momentum, nesterov=True
                )
                self._rule = DiLoCo(
                    self._manager, [model], optimizer, outer, options.sync_every, use_bucketization=True
                )
            self._rule.__enter__()
        except BaseException:
            self._end_lighthouse()
            raise

    def step(self) -> None:
        self._optimizer.step()
        self._steps += 1
        due = self._steps // self._options.sync_every
        if self._manager.current_step() != due:
            raise ShoestringError(
                f"torchft made {self._manager.current_step()} syncs in {self._steps} steps instead of {due}",
                hint="look for torchft's own messages above",
            )

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()

    def facts(self) -> dict[str, Any]:
        import importlib.metadata

        facts: dict[str, Any] = {
            "version": importlib.metadata.version("torchft-nightly"),
            "kind": self._options.kind,
            "sync_every": self._options.sync_every,
            "quantised": False,
            "syncs": self._manager.current_step(),
            "contributions": self._manager.batches_committed(),
        }
        if self._options.kind == "diloco":
            facts["bucketed"] = True
            facts["outer"] = (
                f"SGD, rate {self._options.outer_lr:g}, Nesterov momentum {self._options.outer_momentum:g}"
            )
        return facts

    def close(self) -> None:
        try:
            self._rule.__exit__(None, None, None)
            self._manager.shutdown(wait=False)
            self._group.shutdown()
        finally:
            self._end_lighthouse()

    def _state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self._optimizer.state_dict()}

    def _load_state(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])

    def _end_lighthouse(self) -> None:
        if self._lighthouse is None:
            return
        self._lighthouse.terminate()
        try:
            self._lighthouse.wait(_LEAVE_S)
        except subprocess.TimeoutExpired:
            self._lighthouse.kill()
            self._lighthouse.wait()


def enter(
    place: Place, model: nn.Module, optimizer: torch.optim.Optimizer, options: dict[str, Any]
) -> TorchftEntrant:
    """Join with this host's model, which its optimizer updates."""
    chosen = read_options(options)
    try:
        import torchft  # noqa: F401
    except ModuleNotFoundError as error:
        raise UsageError(
            f"torchft cannot be imported: there is no module `{error.name}`",
            hint="build the environment of the other libraries with `make peers`, and train in it",
        ) from None
    return TorchftEntrant(place, model, optimizer, chosen)


def _reachable(handle: str, address: str) -> str:
    """Give the place to meet, which a process group hands out, by its address."""
    told = msgspec.json.decode(handle, type=dict[str, Any])
    _, _, port = told["store"].rpartition(":")
    return msgspec.json.encode({**told, "store": f"{address}:{port}"}).decode()


def _lighthouse_port(place: Place) -> int:
    return place.port + _PORTS * place.hosts


def _start_lighthouse(place: Place) -> "subprocess.Popen[bytes]":
    patience_ms = round(_PATIENCE.total_seconds() * 1000)
    command = [
        str(Path(sys.executable).with_name("torchft_lighthouse")),
        *("--bind", f"[::]:{_lighthouse_port(place)}"),
        *("--min_replicas", str(place.hosts)),
        *("--join_timeout_ms", str(patience_ms)),
        *("--quorum_tick_ms", "100"),
        # A host whose heartbeat is late is busy, not gone.
        *("--heartbeat_timeout_ms", str(patience_ms)),
    ]
    return subprocess.Popen(confined(command), stdin=subprocess.DEVNULL)
