"""Ray Train: give a `TorchTrainer` this configuration, and its workers are those of a run.

    trainer = TorchTrainer(train, torch_config=ShoestringConfig(codec="dct"), scaling_config=...)

`train` calls `shoestring.init()` and `shoestring.wrap` as every script does. Ray Train places,
starts and restarts the workers; the first worker on each node starts that node's shard and ends
it. `ray.train.report` and Ray's checkpoints are untouched. There is no process group: what needs
`torch.distributed`, such as `prepare_model`, is not needed beside `wrap`.

When Ray Train starts its workers again after a failure, training goes on from the newest
checkpoint in `checkpoint`, a folder that all nodes reach.
"""

import os
import secrets
import shutil
import sys
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.train.backend import Backend
from ray.train.torch.config import TorchConfig

from shoestring.checkpoint.resume import AUTO, begin
from shoestring.config import Run, from_values, of
from shoestring.errors import JoinError, ShoestringError, UsageError
from shoestring.launch.notice import say
from shoestring.launch.ray.keys import RunKeys
from shoestring.launch.ray.process import NodeProcess, ProcessSpec, tcp_address, write_keys
from shoestring.launch.shard import ShardArguments
from shoestring.worker import session

_POLL_S = 5.0
_NAME = "ray-train"
_RAYS_OWN = ("workers", "keys")


class ShoestringConfig(TorchConfig):
    """How the workers of a `TorchTrainer` exchange: settings by name, as in a TOML file of `shoestring run`.

    Ray Train decides how many workers there are, and keys are made for each start.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        values = from_values(settings)
        for name in values:
            if name not in of(Run, values) or name in _RAYS_OWN:
                raise UsageError(
                    f"`{name}` is not for `ShoestringConfig`: Ray Train sees to it",
                    hint="give Ray Train a `ScalingConfig` or `RunConfig`",
                )
        self.run = Run(**{"name": _NAME, **values})

    @property
    def backend_cls(self) -> type["ShoestringBackend"]:
        return ShoestringBackend


class ShoestringBackend(Backend):
    """Makes a group of Ray Train's workers a run. Runs in Ray Train's controller."""

    # A node's workers see all its GPUs that are the run's: `init().local` says which is a worker's own.
    share_cuda_visible_devices = True

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        """Start a shard on each node, and tell every worker its place."""
        given: ShoestringConfig = backend_config
        nodes: list[tuple[str, str]] = worker_group.execute(_whereabouts)
        hosts = list(dict.fromkeys(nodes))
        wanted = given.run
        checkpoint = wanted.checkpoint.absolute() if wanted.checkpoint is not None else None
        run = replace(
            wanted,
            name=f"{wanted.name}-{secrets.token_hex(4)}",
            workers=len(nodes),
            checkpoint=checkpoint,
            incarnation=1,  # a group of workers that starts again has shards of its own
        )
        resume = _checked(worker_group.execute_single(0, _choose, str(wanted.resume or AUTO), checkpoint))
        run = replace(run, resume=Path(resume) if resume else None)
        keys = RunKeys.make(run.workers) if len(hosts) > 1 else None
        starting = [
            worker_group.execute_single_async(
                nodes.index(host), _start_shard, _shard_spec(run, index, hosts, keys)
            )
            for index, host in enumerate(hosts)
        ]
        run = replace(run, shards=tuple(_checked(answer) for answer in ray.get(starting)))
        seen = dict.fromkeys(hosts, 0)
        joining = []
        for worker, host in enumerate(nodes):
            own = replace(run, worker=worker, local=seen[host])
            seen[host] += 1
            joining.append(
                worker_group.execute_single_async(
                    worker, _take_place, own, keys.for_worker(worker) if keys else {}
                )
            )
        ray.get(joining)

    def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
        """Let the workers leave, then end the shards."""
        worker_group.execute(_leave)
        worker_group.execute(_stop_shard, backend_config.run.save_timeout_s)


def _shard_spec(run: Run, index: int, hosts: list[tuple[str, str]], keys: RunKeys | None) -> ProcessSpec:
    shard = ShardArguments(index, len(hosts), run, tcp_address(hosts[index][1]) if keys else "")
    return ProcessSpec(run, shard=shard, keys=keys.for_shard() if keys else {})


def _checked(answer: tuple[str, str, str]) -> str:
    """What a worker found, or the error it met: an error's class does not travel."""
    value, message, hint = answer
    if message:
        raise JoinError(message, hint=hint)
    return value


# The rest runs in the workers' processes, one run at a time.
_shards: list[NodeProcess] = []
_folders: list[str] = []


def _whereabouts() -> tuple[str, str]:
    anything: Any = ray
    return str(anything.get_runtime_context().get_node_id()), str(anything.util.get_node_ip_address())


def _choose(wanted: str, checkpoint: Path | None) -> tuple[str, str, str]:
    try:
        return str(begin(wanted, checkpoint, say) or ""), "", ""
    except ShoestringError as error:
        return "", error.message, error.hint


def _start_shard(spec: ProcessSpec) -> tuple[str, str, str]:
    shard = NodeProcess(spec)
    _shards.append(shard)
    threading.Thread(target=_pass_on, args=(shard,), name="shard's output", daemon=True).start()
    return shard.address()


def _pass_on(shard: NodeProcess) -> None:
    while True:
        report = shard.poll(_POLL_S)
        for line, _ in report.lines:
            print(f"[shard] {line}", file=sys.stderr, flush=True)
        if report.code is not None:
            return


def _take_place(run: Run, keys: dict[str, bytes]) -> None:
    session.end()  # of an earlier training in this process
    if keys:
        folder = tempfile.mkdtemp(prefix="shoestring-")
        _folders.append(folder)
        run = replace(run, keys=write_keys(keys, Path(folder) / "keys"))
    os.environ.update(run.to_environment())


def _leave() -> None:
    session.end()


def _stop_shard(grace_s: float) -> None:
    for shard in _shards:
        shard.stop(grace_s)
        shard.close()
    _shards.clear()
    for folder in _folders:
        shutil.rmtree(folder, ignore_errors=True)
    _folders.clear()
