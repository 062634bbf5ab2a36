"""BatchNorm layers whose statistics are shared, as workers and shards agree on them."""

import math
from collections.abc import Sequence

import msgspec

CHANNEL_LIMIT = 1 << 16  # of a part's layers together: they travel in one header
TOTAL_LIMIT = 1 << 22  # of all layers together, and of layers


class Layer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One BatchNorm layer as all workers and shards must agree on it."""

    name: str
    channels: int
    tensor: int  # the parameter whose part carries its statistics
    keep: float  # how much of the history is left after a step


def check_layers(layers: Sequence[Layer], tensors: int) -> str:
    """Say what is wrong with the layers of a table; empty if nothing is."""
    if sum(1 + max(layer.channels, 0) for layer in layers) > TOTAL_LIMIT:
        return f"{len(layers)} layers have more channels than are taken"
    for layer in layers:
        if not 0 <= layer.tensor < tensors or not 1 <= layer.channels <= CHANNEL_LIMIT:
            return f"layer `{layer.name}` has {layer.channels} channels and parameter {layer.tensor}"
        if not 0 <= layer.keep < 1 or math.isnan(layer.keep):
            return f"layer `{layer.name}` keeps {layer.keep} of its history"
    return ""
