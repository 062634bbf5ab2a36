"""The learning rate of each contestant, as `python -m benchmarks.train --search` found it."""

from benchmarks.train.workloads import Workload

FOUND: dict[str, dict[str, float]] = {
    "conv": {
        "ddp": 0.025,
        "powersgd-2": 0.0125,
        "torchft-diloco": 0.00625,
        "torchft-local": 0.0125,
        "hivemind": 0.0125,
        "shoestring-every": 0.025,
        "shoestring-local": 0.025,
    },
    "gpt": {
        "ddp": 0.002,
        "powersgd-2": 0.004,
        "torchft-diloco": 0.001,
        "torchft-local": 0.002,
        "shoestring-every": 0.002,
        "shoestring-local": 0.002,
    },
}
# Whose rate those have that were not searched for themselves; else DDP's.
_LIKE = {
    "powersgd-1": "powersgd-2",
    "powersgd-4": "powersgd-2",
    "shoestring-auto": "shoestring-every",
    "shoestring-delay": "shoestring-every",
    "shoestring-local-8": "shoestring-local",
}


def rate_of(contestant: str, workload: Workload) -> float:
    """The best learning rate of the grid."""
    found = FOUND[workload.name]
    return found.get(contestant) or found.get(_LIKE.get(contestant, ""), found["ddp"])
