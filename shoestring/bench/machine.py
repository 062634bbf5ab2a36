"""What this machine can do at best: copy memory.

Every rate of a codec is read against the rate of a plain copy in the same minute,
so that a busy machine, or a slow one, does not look like a slow codec.
"""

import statistics
import time

import numpy as np


class Memcpy:
    """Copies a buffer far larger than any cache, on one thread, whenever it is asked.

    Rates count the bytes copied once, not once for reading and once for writing.
    """

    def __init__(self, size_mib: int) -> None:
        # Filled, so that the first copy does not pay for fresh pages.
        self._source = np.ones(size_mib << 20, np.uint8)
        self._target = np.zeros_like(self._source)
        self._rates: list[float] = []

    def sample(self, times: int = 1) -> list[float]:
        """Copy `times` times; return the rate of each copy in GB/s."""
        rates = []
        for _ in range(times):
            start = time.perf_counter()
            np.copyto(self._target, self._source)
            rates.append(self._source.nbytes / (time.perf_counter() - start) / 1e9)
        self._rates += rates
        return rates

    @property
    def gbps(self) -> float:
        """The median of all copies so far; of a few now, if there were none."""
        return statistics.median(self._rates or self.sample(5))
