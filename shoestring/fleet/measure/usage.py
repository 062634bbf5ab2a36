"""How busy a GPU is while something runs on it, as NVML sees it."""

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from shoestring.fleet.engine.devices import Device

_EVERY_S = 0.05


@dataclass
class Usage:
    """Moments at which a device was looked at: when, busy, bandwidth in use, the last two as parts of 1."""

    used_before: int = 0  # bytes, before the task was started
    moments: list[tuple[float, float, float]] = field(default_factory=list)

    def between(self, start: float, end: float) -> tuple[float, float]:
        """The mean of both over a time of the wall clock; a device nobody could look at counts as busy."""
        inside = [moment for moment in self.moments if start <= moment[0] <= end]
        if not inside:
            return 1.0, 0.0
        return (
            sum(moment[1] for moment in inside) / len(inside),
            sum(moment[2] for moment in inside) / len(inside),
        )


@contextlib.contextmanager
def watch_usage(device: Device) -> Iterator[Usage]:
    """Look at a GPU until the `with` ends; a CPU device is not looked at."""
    usage = Usage()
    ended = threading.Event()
    thread = None
    if device.is_gpu:
        with contextlib.suppress(Exception):  # without NVML nothing is seen, and `between` says so
            import pynvml as nvml

            nvml.nvmlInit()
            handle = nvml.nvmlDeviceGetHandleByUUID(device.uuid)
            usage.used_before = int(nvml.nvmlDeviceGetMemoryInfo(handle).used)

            def look() -> None:
                with contextlib.suppress(nvml.NVMLError):
                    while not ended.wait(_EVERY_S):
                        rates = nvml.nvmlDeviceGetUtilizationRates(handle)
                        usage.moments.append((time.time(), rates.gpu / 100, rates.memory / 100))

            thread = threading.Thread(target=look, name="usage", daemon=True)
            thread.start()
    try:
        yield usage
    finally:
        ended.set()
        if thread is not None:
            thread.join()
