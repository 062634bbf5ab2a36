"""The random states of a process, as data."""

import random
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shoestring.worker.session import Session

Tensors = dict[str, NDArray[Any]]


def random_state() -> tuple[Tensors, dict[str, Any]]:
    """Return the states of Python's, NumPy's and torch's generators: arrays, and the small rest."""
    version, internal, gauss = random.getstate()
    name, keys, place, has_gauss, cached = np.random.get_state(legacy=True)
    tensors: Tensors = {
        "random.python": np.array(internal, np.int64),
        "random.numpy": np.array(keys, np.int64),
        "random.torch": torch.get_rng_state().numpy().copy(),
    }
    if torch.cuda.is_available():
        for index, state in enumerate(torch.cuda.get_rng_state_all()):
            tensors[f"random.cuda.{index}"] = state.numpy().copy()
    facts = {"python": [version, gauss], "numpy": [name, int(place), int(has_gauss), float(cached)]}
    return tensors, facts


def restore_random(here: Session) -> None:
    """Set the generators as they were when the checkpoint this session resumed from was made."""
    if here.resumed_random is None:
        return
    tensors, facts = here.resumed_random
    version, gauss = facts["python"]
    random.setstate((version, tuple(int(word) for word in tensors["random.python"]), gauss))
    name, place, has_gauss, cached = facts["numpy"]
    np.random.set_state((name, tensors["random.numpy"].astype(np.uint32), place, has_gauss, cached))
    torch.set_rng_state(torch.from_numpy(tensors["random.torch"].copy()))
    cuda = [name for name in tensors if name.startswith("random.cuda.")]
    if cuda and torch.cuda.is_available():
        torch.cuda.set_rng_state_all([torch.from_numpy(tensors[name].copy()) for name in sorted(cuda)])
