"""The random states of a process, as data."""

import random

import numpy as np
import torch

from shoestring.checkpoint.worker import RandomState, Tensors
from shoestring.worker.session import Session


def random_state() -> RandomState:
    """Return the states of Python's, NumPy's and torch's generators."""
    version, internal, gauss = random.getstate()
    name, keys, place, has_gauss, cached = np.random.get_state(legacy=True)
    generators: Tensors = {
        "python": np.array(internal, np.int64),
        "numpy": np.array(keys, np.int64),
        "torch": torch.get_rng_state().numpy().copy(),
    }
    if torch.cuda.is_available():
        for index, state in enumerate(torch.cuda.get_rng_state_all()):
            generators[f"cuda.{index}"] = state.numpy().copy()
    facts = {"python": [version, gauss], "numpy": [name, int(place), int(has_gauss), float(cached)]}
    return RandomState(generators, facts)


def restore_random(here: Session) -> None:
    """Set the generators as they were when the checkpoint this session resumed from was made."""
    saved = here.resumed.random
    if saved is None:
        return
    generators, facts = saved.generators, saved.facts
    version, gauss = facts["python"]
    random.setstate((version, tuple(int(word) for word in generators["python"]), gauss))
    name, place, has_gauss, cached = facts["numpy"]
    np.random.set_state((name, generators["numpy"].astype(np.uint32), place, has_gauss, cached))
    torch.set_rng_state(torch.from_numpy(generators["torch"].copy()))
    cuda = [name for name in generators if name.startswith("cuda.")]
    if cuda and torch.cuda.is_available():
        torch.cuda.set_rng_state_all([torch.from_numpy(generators[name].copy()) for name in sorted(cuda)])
