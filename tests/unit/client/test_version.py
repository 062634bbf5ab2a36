"""A version's parameters, in torch models and as a hash."""

import hashlib

import numpy as np
import pytest
import torch
from torch import nn

from shoestring.client.version import Version
from shoestring.errors import UsageError


def version_of(model: nn.Module, **others) -> Version:
    named = dict(model.named_parameters())
    arrays = {name: own.detach().float().numpy() + np.float32(1) for name, own in named.items()} | others
    return Version(3, True, arrays, dict.fromkeys(arrays, "float32"))


def test_parameters_are_copied_into_a_model():
    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1))
    version = version_of(model)
    version.load_into(model)
    for name, own in model.named_parameters():
        np.testing.assert_array_equal(own.detach().numpy(), version.parameters[name])


def test_weights_that_several_modules_share_are_one_parameter():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    version = version_of(model)
    assert set(version.parameters) == {"0.weight", "0.bias", "1.bias"}
    version.load_into(model)
    assert model[1].weight is model[0].weight
    np.testing.assert_array_equal(model[1].weight.detach().numpy(), version.parameters["0.weight"])


def test_what_would_stay_as_it_is_is_refused():
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    version, before = version_of(model), model[0].weight.clone()
    with pytest.raises(
        UsageError, match=r"`1.running_mean`, `1.running_var`, `1.num_batches_tracked`, which"
    ):
        version.load_into(model)
    assert torch.equal(model[0].weight, before)
    version.load_into(model, strict=False)
    assert torch.equal(model[0].weight, before + 1)


def test_frozen_parameters_are_not_on_shards():
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    version = version_of(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(UsageError, match=r"`1.weight`, `1.bias`, `2.weight` and 3 more"):
        version.load_into(model)


def test_another_model_is_refused_before_anything_is_copied():
    model = nn.Linear(3, 2)
    with pytest.raises(UsageError, match="the run trains `other`"):
        version_of(model, other=np.zeros(1, np.float32)).load_into(model, strict=False)
    with pytest.raises(UsageError, match=r"`weight` has shape \(3, 3\), in the run \(2, 3\)"):
        version_of(model).load_into(nn.Linear(3, 3))


def test_the_hash_is_that_of_the_bits_that_workers_hold():
    values = torch.tensor([1.5, -0.0, 3e38]).bfloat16()
    arrays = {"wide": np.array([[1.5]], np.float32), "narrow": values.float().numpy()}
    version = Version(0, True, arrays, {"wide": "float32", "narrow": "bfloat16"})
    digest = hashlib.sha256(arrays["wide"].tobytes() + values.view(torch.uint8).numpy().tobytes())
    assert version.parameter_hash() == digest.hexdigest()
