"""The identity of a worker's connection: who it is, and which of its models the connection is for.

A process may train several models (a GAN has two). Each has connections of its own, and at the shards
a state machine of its own; which one a message is for is told by the connection. Two further numbers for
each of them are for what its workers tell each other before the first round.
"""

TRAINED_LIMIT = 64
MODEL_LIMIT = 3 * TRAINED_LIMIT


def identity_of(worker: int, life: str, model: int) -> bytes:
    """The identity of one process's connection for its model of this number."""
    return f"{worker}.{life}.{model}".encode()


def beside(model: int, which: int) -> int:
    """The number of the first (0) or second (1) gathering before the rounds of a model."""
    return TRAINED_LIMIT + 2 * model + which


def model_of(identity: bytes) -> int | None:
    """The number of the model that a connection is for; none if there can be no such model."""
    _, _, number = identity.rpartition(b".")
    if identity.count(b".") < 2:
        return 0
    return int(number) if number.isdigit() and len(number) < 4 and int(number) < MODEL_LIMIT else None
