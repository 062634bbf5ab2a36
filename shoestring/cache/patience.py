"""Try again until a time is over.

The kernel's locks can be waited for without a bound or not at all, and a file that another
process is to write not at all. A wait with a bound asks, pauses and asks again, more slowly
each time.
"""

import time
from collections.abc import Iterator

_FIRST_PAUSE_S = 0.0001


def attempts(timeout_s: float, longest_pause_s: float) -> Iterator[None]:
    """Yield for each attempt, the first at once; end when the time is over."""
    deadline = time.monotonic() + timeout_s
    pause_s = _FIRST_PAUSE_S
    yield
    while time.monotonic() < deadline:
        time.sleep(pause_s)  # what is waited for tells nobody when it is there
        pause_s = min(2 * pause_s, longest_pause_s)
        yield
