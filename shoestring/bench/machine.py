"""What this machine can do at best: copy memory, and run several threads at once.

Every rate of a codec is read against the rate of a plain copy in the same minute,
so that a busy machine, or a slow one, does not look like a slow codec. And what threads
gain is measured while the machine's cores are there: those of a virtual machine come and
go, and two of them may be one for a while.
"""

import statistics
import threading
import time

import numpy as np

from shoestring.compiled.jit import decode_jit


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


_TURNS = 1_000_000  # two milliseconds or so
_WHOLE = 0.88  # of what as many cores would give
_LOOKS = 3  # one alone may fall into a moment when they are there


class Cores:
    """Asks how much more `threads` threads get done than one: arithmetic alone, no memory."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.seen: list[float] = []
        _stir(1)

    def scaling(self) -> float:
        """Return how many times as fast as one thread all of them are, now."""
        one = _time_stirring(1)
        self.seen.append(self.threads * one / _time_stirring(self.threads))
        return self.seen[-1]

    def are_there(self) -> bool:
        """Say whether each thread has a core to itself, now."""
        return self.threads == 1 or all(self.scaling() >= _WHOLE * self.threads for _ in range(_LOOKS))


def _time_stirring(threads: int) -> float:
    others = [threading.Thread(target=_stir, args=(_TURNS,)) for _ in range(threads - 1)]
    start = time.perf_counter()
    for other in others:
        other.start()
    _stir(_TURNS)
    for other in others:
        other.join()
    return time.perf_counter() - start


@decode_jit
def _stir(turns: int) -> np.uint64:
    """Keep all of a core's arithmetic units busy: four chains of shifts that wait for nothing else."""
    a, b, c, d = np.uint64(1), np.uint64(2), np.uint64(3), np.uint64(4)
    thirteen, seven, seventeen = np.uint64(13), np.uint64(7), np.uint64(17)
    for _ in range(turns):
        a, b, c, d = a ^ a << thirteen, b ^ b << thirteen, c ^ c << thirteen, d ^ d << thirteen
        a, b, c, d = a ^ a >> seven, b ^ b >> seven, c ^ c >> seven, d ^ d >> seven
        a, b, c, d = a ^ a << seventeen, b ^ b << seventeen, c ^ c << seventeen, d ^ d << seventeen
    return a ^ b ^ c ^ d
