"""Devices that jobs can run on: NVIDIA GPUs, found through NVML, and groups of CPU cores.

Devices of one kind are alike: what was measured on one of them holds for all. A CPU device
is some cores, and a share of their time where it is below 1; two CPU devices never have a
core in common, so that one's work takes no time of the other's.

A host's devices and their measured rates are kept in a JSON file, see `save` and `load`.
"""

import json
import math
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from shoestring.errors import FleetError

_FILE_BYTES = 1 << 20
_DEVICES = 4096
_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")


@dataclass(frozen=True)
class Rates:
    """The highest rates of a device, measured by `measure/rates.py`."""

    copy_bytes_s: float
    matmul_flop_s: float
    upload_bytes_s: float | None = None  # from the host's memory; none where it is the same memory


@dataclass(frozen=True)
class Device:
    """One place for jobs. `uuid` is a GPU's, `cores` and `share` are a CPU device's."""

    name: str
    kind: str
    memory_bytes: int
    free_bytes: int
    capability: str = ""
    uuid: str = ""
    cores: tuple[int, ...] = ()
    share: float = 1.0
    rates: Rates | None = None

    def __post_init__(self) -> None:
        for what in (self.name, self.kind):
            if not _NAME.fullmatch(what):
                raise FleetError(
                    f"a device cannot be called `{what}`",
                    hint="use small letters, digits, `-`, `_` and `.`, at most 64",
                )
        if not (math.isfinite(self.share) and 0 < self.share <= 1):
            raise FleetError(
                f"device `{self.name}` has a share of {self.share}", hint="give a number from 0.01 to 1"
            )
        if not self.uuid and not self.cores:
            raise FleetError(f"device `{self.name}` has no cores", hint="write it like `slow=2,3:0.5`")

    @property
    def is_gpu(self) -> bool:
        return bool(self.uuid)

    @property
    def usable_bytes(self) -> int:
        """The memory that jobs may take: of a GPU, what others had left when it was looked at."""
        return self.free_bytes if self.is_gpu else self.memory_bytes


def neighbours_of(device: Device, devices: Sequence[Device]) -> list[Device]:
    """Choose a CPU device's neighbours from its machine's devices: the other CPU devices. A GPU has none."""
    if device.is_gpu:
        return []
    return [other for other in devices if not other.is_gpu and other.name != device.name]


def find_devices(cpu: str = "") -> list[Device]:
    """List this machine's GPUs; its CPU sockets where there is none, or the CPU devices `cpu` asks for."""
    found = find_gpus()
    if cpu:
        found += parse_cpus(cpu)
    return found or find_sockets()


def find_gpus() -> list[Device]:
    """List the NVIDIA GPUs this process may see; none where there is no driver."""
    try:
        import pynvml as nvml

        nvml.nvmlInit()
    except Exception:  # the package, the library or the driver is missing: no GPU either way
        return []
    try:
        devices = []
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
            devices.append(
                Device(
                    name=f"gpu{index}",
                    kind=_slug(_text(nvml.nvmlDeviceGetName(handle))),
                    memory_bytes=int(memory.total),
                    free_bytes=int(memory.free),
                    capability=f"{major}.{minor}",
                    uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
                )
            )
    finally:
        nvml.nvmlShutdown()
    return _visible(devices, os.environ.get("CUDA_VISIBLE_DEVICES"))


def find_sockets() -> list[Device]:
    """List the CPU sockets whose cores this process may use."""
    sockets: dict[int, list[int]] = {}
    for core in sorted(os.sched_getaffinity(0)):
        sockets.setdefault(_socket_of(core), []).append(core)
    return [_cpu(f"cpu{n}", f"cpu-{len(cores)}", cores) for n, cores in enumerate(sockets.values())]


def parse_cpus(text: str) -> list[Device]:
    """Read CPU devices from text: `fast=0-3,slow=4:0.33` is two, the second with a third of a core's time."""
    cores_of: dict[str, list[int]] = {}
    shares: dict[str, float] = {}
    name = ""
    try:
        for item in text.split(","):
            head, equals, rest = item.strip().partition("=")
            if equals:
                name = head.strip()
                if name in cores_of:
                    raise FleetError(f"device `{name}` is given twice", hint="give each a name of its own")
                cores_of[name] = []
            cores, colon, share = (rest if equals else head).partition(":")
            cores_of[name] += _core_range(cores)
            if colon:
                shares[name] = float(share)
    except (ValueError, KeyError):
        raise FleetError(
            f"`{text}` does not say which CPU devices there are",
            hint="write it like `fast=0-3,slow=4:0.33`: names, cores, and a share below 1 if you want one",
        ) from None
    devices = [_cpu(name, name, cores, shares.get(name, 1.0)) for name, cores in cores_of.items()]
    _check_cores(devices)
    return devices


def save(devices: Sequence[Device], path: Path) -> None:
    """Write devices to a file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(json.dumps([asdict(device) for device in devices], indent=2) + "\n")
    part.replace(path)


def load(path: Path) -> list[Device]:
    """Read devices that `save` wrote, with the free memory of this moment where that is known."""
    hint = "write it anew with `shoestring fleet devices`"
    try:
        with path.open("rb") as file:
            data = file.read(_FILE_BYTES)
        devices = msgspec.json.decode(data, type=list[Device])
    except FileNotFoundError:
        raise FleetError(f"there is no device file `{path}`", hint=hint) from None
    except (OSError, ValueError) as error:
        raise FleetError(f"`{path}` is no device file: {error}", hint=hint) from None
    if len(devices) > _DEVICES or len({device.name for device in devices}) < len(devices):
        raise FleetError(f"`{path}` names a device twice, or more than {_DEVICES}", hint=hint)
    free = {device.uuid: device.free_bytes for device in find_gpus()} if devices else {}
    return [replace(device, free_bytes=free.get(device.uuid, device.free_bytes)) for device in devices]


def _cpu(name: str, kind: str, cores: Sequence[int], share: float = 1.0) -> Device:
    import psutil

    memory = psutil.virtual_memory()
    usable = len(os.sched_getaffinity(0))
    part = min(1.0, len(cores) / usable)  # memory is divided as the cores are
    return Device(
        name, kind, int(memory.total * part), int(memory.available * part), cores=tuple(cores), share=share
    )


def _core_range(text: str) -> list[int]:
    head, dash, tail = text.strip().partition("-")
    first, last = int(head), int(tail if dash else head)
    if not first <= last < first + _DEVICES:  # checked before any core is listed
        raise ValueError
    return list(range(first, last + 1))


def _check_cores(devices: Sequence[Device]) -> None:
    usable, taken = os.sched_getaffinity(0), set[int]()
    for device in devices:
        for core in device.cores:
            if core not in usable or core in taken:
                why = "is in two devices" if core in taken else "is not one this process may use"
                raise FleetError(
                    f"core {core} of device `{device.name}` {why}",
                    hint=f"choose from {', '.join(map(str, sorted(usable)))}, each once",
                )
            taken.add(core)


def _socket_of(core: int) -> int:
    try:
        return int(Path(f"/sys/devices/system/cpu/cpu{core}/topology/physical_package_id").read_text())
    except (OSError, ValueError):
        return 0


def _visible(devices: list[Device], setting: str | None) -> list[Device]:
    """List the GPUs that `CUDA_VISIBLE_DEVICES` names: the fleet uses no other."""
    if setting is None:
        return devices
    kept = []
    for wanted in filter(None, (item.strip() for item in setting.split(","))):
        kept += [d for i, d in enumerate(devices) if wanted == str(i) or d.uuid.startswith(wanted)][:1]
    return kept


def _slug(name: str) -> str:
    words = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return (words.removeprefix("nvidia-").removeprefix("geforce-") or "gpu")[:64]


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
