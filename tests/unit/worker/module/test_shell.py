"""A wrapped model is copied, pickled and compiled like a plain one."""

import copy
import io

import pytest
import torch
from torch import nn

from shoestring.config import Run
from shoestring.observe.events import EventLog
from shoestring.worker.session import Session
from shoestring.worker.wrap import join
from tests.unit.worker.cluster import Cluster


class Model(nn.Module):
    """Of a class that `torch.load` finds."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())


@pytest.fixture
def here():
    with Cluster(1, 1) as cluster, cluster.session(0) as here:
        yield here


def test_the_model_stays_the_same_object_with_the_same_names(here):
    model = Model()
    names, given = list(model.state_dict()), model
    assert join(here, model, codec="float32") is given
    assert list(model.state_dict()) == names
    assert (type(model).__name__, type(model).__module__) == ("Model", Model.__module__)
    assert isinstance(model, Model)
    assert repr(model) == repr(Model())


def test_module_is_the_same_model_once(here):
    model = join(here, Model(), codec="float32")
    inner = model.module
    assert isinstance(inner, Model)
    assert not hasattr(inner, "module")
    assert all(a is b for a, b in zip(inner.parameters(), model.parameters(), strict=True))
    model.first = nn.Linear(4, 4)
    assert inner.first is model.first
    assert type(copy.deepcopy(inner)) is Model
    copy.deepcopy(inner)(torch.ones(1, 4))
    assert here.forwards == 0


def test_a_submodule_of_that_name_is_left_alone(here):
    model = nn.Module()
    model.module = nn.Linear(2, 2)
    inner = model.module
    assert join(here, model, codec="float32").module is inner


@pytest.mark.parametrize("with_optimizer", [False, True])
def test_copies_and_pickles_are_plain_models_that_count_no_passes(here, with_optimizer):
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1) if with_optimizer else None
    join(here, model, optimizer, codec="float32")
    seen = []
    model.register_forward_pre_hook(seen.append and (lambda *_: seen.append(1)))
    twin = copy.deepcopy(model)
    assert type(twin) is Model
    twin(torch.ones(1, 4)).sum().backward()
    assert here.forwards == 0
    assert len(seen) == 1  # the script's own hooks are copied
    model._forward_pre_hooks.popitem()
    memory = io.BytesIO()
    torch.save(model, memory)
    memory.seek(0)
    loaded = torch.load(memory, weights_only=False)
    assert type(loaded) is Model
    for one in (twin, loaded):
        assert all(torch.equal(a, b) for a, b in zip(one.parameters(), model.parameters(), strict=True))
    model(torch.ones(1, 4)).sum().backward()
    assert here.forwards == 1


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_compiled_model_is_compiled_once(here, when):
    compiled = []

    def backend(graph, _):
        compiled.append(graph)
        return graph.forward

    model = Model()
    if when == "before":
        model = torch.compile(model, backend=backend)
    model = join(here, model, codec="float32")
    if when == "after":
        model = torch.compile(model, backend=backend, fullgraph=True)
    for _ in range(20):
        model(torch.ones(3, 4)).sum().backward()
    assert here.forwards == 20
    assert len(compiled) == 1
    assert set(model.state_dict()) in (
        set(Model().state_dict()),
        {f"_orig_mod.{n}" for n in Model().state_dict()},
    )


def test_alone_nothing_is_sent():
    here = Session(Run(), "1", EventLog(None, "test"))
    model = join(here, Model())
    with model.no_sync():
        model(torch.ones(1, 4)).sum().backward()
    assert here.forwards == 1
    assert isinstance(model.module, Model)
    here.close()
