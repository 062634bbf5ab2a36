"""The engine of this machine: a task is a process, limited to its devices.

A GPU task sees only its own GPUs and may take only its memory of them; a CPU task has its
device's cores, as many threads, and their share of time. When the engine's process ends, by
SIGKILL too, its tasks do.

A task of one device is the script alone, with a shard inside; one of several devices runs
under `shoestring run`, a worker for each.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from shoestring.fleet.contract import MEMORY_BYTES, STOP
from shoestring.fleet.engine.base import Running, Task
from shoestring.fleet.engine.confine import confined
from shoestring.fleet.engine.devices import Device, neighbours_of
from shoestring.fleet.engine.quota import Quota

OUTPUT = "output.log"

_STOP_FILE = "stop"
_KILL_S = 30.0
# What tells a process that it belongs to another run.
_FOREIGN = ("SHOESTRING_", "SLURM_", "TORCHELASTIC_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_")


class LocalEngine:
    """Runs tasks as processes of this machine."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self.devices = tuple(devices)
        self._quotas: dict[str, Quota] = {}
        self._processes: list[_Process] = []

    def neighbours(self, device: Device) -> Sequence[Device]:
        return neighbours_of(device, self.devices)

    def start(self, task: Task) -> Running:
        task.folder.mkdir(parents=True, exist_ok=True)
        stop = task.folder / _STOP_FILE
        stop.unlink(missing_ok=True)
        cores = [core for device in task.devices for core in device.cores]
        is_gpu = any(device.is_gpu for device in task.devices)
        command = confined(
            _command(task),
            cores=cores,
            group=self._group(task.devices),
            memory_bytes=0 if is_gpu else task.memory_bytes,
        )
        with (task.folder / OUTPUT).open("ab") as output:
            process = _Process(command, environment_of(task, stop), output, stop)
        self._processes = [one for one in self._processes if one.poll() is None] + [process]
        return process

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for quota in self._quotas.values():
            quota.close()
        self._quotas.clear()

    def _group(self, devices: Sequence[Device]) -> Path | None:
        if all(device.share == 1 for device in devices):
            return None
        name = "+".join(device.name for device in devices)
        if name not in self._quotas:
            self._quotas[name] = Quota(name, sum(len(device.cores) * device.share for device in devices))
        return self._quotas[name].folder


class _Process:
    def __init__(
        self, command: list[str], environment: Mapping[str, str], output: IO[bytes], stop: Path
    ) -> None:
        self._stop = stop
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            process_group=0,  # Ctrl-C is for the fleet, which asks its tasks to stop
        )

    def poll(self) -> int | None:
        code = self._process.poll()
        if code is not None:
            self._end_group()
            return code if code >= 0 else 128 - code
        return None

    def wait(self, timeout_s: float) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        return self.poll()

    def ask_stop(self) -> None:
        self._stop.touch()

    def withdraw_stop(self) -> None:
        self._stop.unlink(missing_ok=True)

    def kill(self) -> None:
        if self._process.poll() is None:
            # SIGTERM first: `shoestring run` ends its own processes then.
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_KILL_S)
        self._end_group()
        self._process.wait()

    def _end_group(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)


def environment_of(task: Task, stop: Path, base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables a task is started with."""
    environment = {name: value for name, value in base.items() if not name.startswith(_FOREIGN)}
    environment |= {
        "PYTHONUNBUFFERED": "1",
        "SHOESTRING_RUN": task.name,
        "SHOESTRING_FOLDER": str(task.folder),
        STOP: str(stop),
    }
    if task.checkpoint is not None:
        environment["SHOESTRING_CHECKPOINT"] = str(task.checkpoint)
        environment["SHOESTRING_EVERY"] = str(task.every)
    gpus = [device.uuid for device in task.devices if device.is_gpu]
    environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    if gpus:
        # Memory then follows the batch size closely, which is what plans rest on.
        environment.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
        if task.memory_bytes:
            environment[MEMORY_BYTES] = str(task.memory_bytes)
    else:
        threads = sum(len(device.cores) for device in task.devices) // len(task.devices)
        environment["OMP_NUM_THREADS"] = str(max(1, threads))
    return {**environment, **task.environment}


def _command(task: Task) -> list[str]:
    if len(task.devices) == 1:
        return [sys.executable, *task.command]
    return [
        sys.executable, "-m", "shoestring", "run", "--workers", str(len(task.devices)),
        "--folder", str(task.folder), *task.command,
    ]  # fmt: skip
