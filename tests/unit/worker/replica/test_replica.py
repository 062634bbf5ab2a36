"""Parameters of any memory format and precision cross to flat float32 vectors and back."""

import numpy as np
import pytest
import torch
from torch import nn

from shoestring.errors import UsageError
from shoestring.model.precision import from_bits, to_bits
from shoestring.worker.replica.replica import Replica


class Zoo(nn.Module):
    """Weights that lie in memory in many ways."""

    def __init__(self, *dtypes: torch.dtype) -> None:
        super().__init__()
        source = torch.Generator().manual_seed(3)

        def noise(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=source)

        tensors = {
            "plain": noise(40, 3),
            "conv": noise(4, 5, 3, 3).to(memory_format=torch.channels_last),
            "volume": noise(2, 3, 4, 2, 5).to(memory_format=torch.channels_last_3d),
            "transposed": noise(7, 11).t(),
            "strided": noise(9, 8)[::2, ::3],
            "scalar": noise(1)[0],
            "none": noise(0, 4),
            "vector": noise(130),
        }
        for index, (name, tensor) in enumerate(tensors.items()):
            own = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtypes[index % len(dtypes)])
            own.copy_(tensor)
            setattr(self, name, nn.Parameter(own))


def make(model: nn.Module) -> Replica:
    """As shards update it, but for float64, which the script updates."""
    if any(parameter.dtype == torch.float64 for parameter in model.parameters()):
        return Replica(model, None)
    return Replica(model, torch.optim.SGD(model.parameters(), 0.1))


MIXTURES = {
    "float32": (torch.float32,),
    "bfloat16": (torch.bfloat16,),
    "float16": (torch.float16,),
    "mixed": (torch.bfloat16, torch.float32, torch.float16),
    "with float64": (torch.float64, torch.bfloat16, torch.float32),
}


def flat(tensors) -> np.ndarray:
    return np.concatenate([tensor.detach().float().reshape(-1).numpy() for tensor in tensors])


@pytest.mark.parametrize("dtypes", MIXTURES.values(), ids=MIXTURES)
def test_what_is_written_is_what_the_parameters_hold_of_it(dtypes):
    model = Zoo(*dtypes)
    replica = make(model)
    parameters = list(model.parameters())
    names = [str(parameter.dtype).removeprefix("torch.") for parameter in parameters]
    assert [tensor.dtype for tensor in replica.tensors] == names
    strides = [parameter.stride() for parameter in parameters]
    (part,) = replica.parts
    np.testing.assert_array_equal(replica.read(part), flat(parameters))
    assert replica.gather(part).dtype == torch.float32
    np.testing.assert_array_equal(replica.gather(part).numpy(), flat(parameters))

    values = np.random.default_rng(1).standard_normal(part.size).astype(np.float32)
    held = values.copy()
    start = 0
    for parameter, name in zip(parameters, names, strict=True):
        own = held[start : start + parameter.numel()]
        if name in ("bfloat16", "float16"):
            own[:] = from_bits(to_bits(own, name), name)
        start += parameter.numel()
    for write in (replica.write, lambda part, values: change(replica, part, values)):
        replica.write(part, np.zeros(part.size, np.float32))
        write(part, values)
        np.testing.assert_array_equal(flat(parameters), held)
        np.testing.assert_array_equal(replica.read(part), held)
    assert [parameter.stride() for parameter in parameters] == strides
    assert [str(parameter.dtype).removeprefix("torch.") for parameter in parameters] == names


def change(replica: Replica, part, values) -> None:
    """As an answer is decoded: on the host, then on the device."""
    with replica.on_host(part) as own:
        own[: part.size // 2] = values[: part.size // 2]
    with replica.on_device(part) as there:
        there[part.size // 2 :] = torch.from_numpy(values)[part.size // 2 :]


@pytest.mark.parametrize("dtypes", MIXTURES.values(), ids=MIXTURES)
def test_gradients_are_read_as_float32_in_the_order_of_the_shape(dtypes):
    model = Zoo(*dtypes)
    replica = make(model)
    (part,) = replica.parts
    for index, parameter in enumerate(model.parameters()):
        parameter.grad = None if index == 3 else (parameter.detach() * 3).to(parameter.dtype)
    gradients = [
        parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        for parameter in model.parameters()
    ]
    kept = np.random.default_rng(2).standard_normal(part.size).astype(np.float32)
    kept.flags.writeable = False
    for feedback in (None, kept):
        want = flat(gradients) if feedback is None else flat(gradients) + feedback
        values, used = replica.read_gradient(part, None, feedback)
        there = None if feedback is None else torch.from_numpy(feedback.copy())
        gathered, used_there = replica.gather_gradient(part, there)
        np.testing.assert_array_equal(values, want)
        np.testing.assert_array_equal(gathered.numpy(), want)
        assert used.tolist() == used_there.tolist()
        assert used.sum() == len(part.pieces) - 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sparse_gradient_is_read_as_a_dense_one(dtype):
    model = nn.Embedding(20, 6, sparse=True, dtype=dtype)
    dense = nn.Embedding(20, 6, _weight=model.weight.detach().clone())
    for own in (model, dense):
        own(torch.tensor([3, 3, 7])).float().square().sum().backward()
    assert model.weight.grad is not None
    assert model.weight.grad.is_sparse
    (part,) = make(model).parts
    for found, want in zip(
        make(model).read_gradient(part, None, None), make(dense).read_gradient(part, None, None), strict=True
    ):
        np.testing.assert_array_equal(found, want)
    gathered, _ = make(model).gather_gradient(part, None)
    np.testing.assert_array_equal(gathered.numpy(), flat([dense.weight.grad]))


def test_only_float32_is_laid_out_as_one_run():
    assert make(nn.Linear(4, 3)).home(make(nn.Linear(4, 3)).parts[0]) is not None
    for dtypes in ((torch.bfloat16,), (torch.float32, torch.float16)):
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
        for layer, dtype in zip(model, dtypes * 2, strict=False):
            layer.to(dtype)
        replica = make(model)
        assert replica.home(replica.parts[0]) is None


def test_equal_bits_have_equal_digests_whatever_they_are_made_of():
    digests = set()
    for dtypes in MIXTURES.values():
        one, other = (make(Zoo(*dtypes)) for _ in range(2))
        assert one.digest() == other.digest()
        digests.add(one.digest())
    assert len(digests) == len(MIXTURES)


@pytest.mark.parametrize(
    ("dtype", "hint"), [(torch.float64, "wrap(model)"), (torch.complex64, "real"), (torch.complex128, "real")]
)
def test_what_shards_cannot_update_is_refused_with_a_cure(dtype, hint):
    model = nn.ParameterList([torch.zeros(3), nn.Parameter(torch.zeros(3, dtype=dtype))])
    with pytest.raises(UsageError, match=str(dtype)) as caught:
        Replica(model, torch.optim.SGD(model.parameters(), 0.1))
    assert hint in caught.value.hint


def test_whole_numbers_may_be_there_as_they_are_not_trained():
    model = nn.Linear(3, 2)
    model.register_parameter("codes", nn.Parameter(torch.zeros(4, dtype=torch.int8), requires_grad=False))
    assert [tensor.name for tensor in make(model).tensors] == ["weight", "bias"]
