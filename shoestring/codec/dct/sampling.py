"""Which blocks of a tensor are looked at before it is coded: the same on every backend.

A group is about 2,048 values: what the CPU transforms at once, and the unit of a sample.
The blocks of a sampled group come in runs from all over the tensor, as its rows differ.
"""

MAX_GROUPS = 8
RUNS = 4
VALUES_A_GROUP = 1 << 16  # a group stands for this many values


def lanes_of(n: int) -> int:
    """How many n x n blocks make a group."""
    return max(8, 2048 // (n * n) // 8 * 8)


def sample_shape(size: int, n: int, most_groups: int = MAX_GROUPS) -> tuple[int, int, int]:
    """Return (groups, runs of a group, blocks of a run) of a tensor's sample."""
    lanes = min(lanes_of(n), size // (n * n))
    runs = max(1, min(RUNS, lanes))
    return max(1, min(most_groups, size // VALUES_A_GROUP)), runs, lanes // runs


def run_starts(size: int, n: int, most_groups: int = MAX_GROUPS) -> list[int]:
    """Return the first block of each run of a tensor's sample."""
    groups, runs, each = sample_shape(size, n, most_groups)
    apart = max(groups * runs - 1, 1)
    return [k * (size // (n * n) - each) // apart for k in range(groups * runs)]
