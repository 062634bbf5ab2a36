"""The table of a model: all that workers and shards must agree on before a run begins.

A worker sends it when it joins; the first difference from the others' is named.
"""

import math
from collections.abc import Sequence

import msgspec

from shoestring.errors import JoinError, WireError
from shoestring.model.layers import Layer, check_layers
from shoestring.model.parts import Part, cut
from shoestring.model.precision import DTYPES, Precision
from shoestring.model.rules import Rule

TENSOR_LIMIT = 1 << 20
GROUP_LIMIT = 1 << 16
VALUE_LIMIT = 1 << 36
POLICY_LIMIT = 256


class Tensor(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One trainable parameter as all workers and shards must agree on it."""

    name: str
    shape: tuple[int, ...]
    group: int
    dtype: str = "float32"  # as torch names it


class Table(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """All that a run's workers have in common."""

    tensors: tuple[Tensor, ...]
    rule: Rule
    groups: int
    clip_norm: float  # 0: none
    layers: tuple[Layer, ...] = ()  # whose statistics are shared
    policy: str = ""  # when workers exchange, as text: a run has one policy


def read_table(payload: memoryview) -> Table:
    try:
        return msgspec.msgpack.decode(payload, type=Table)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(
            f"the model's table cannot be read: {error}", hint="check both sides' versions"
        ) from None


def parts_of(table: Table) -> tuple[Part, ...]:
    """The parts that every side cuts this model into."""
    return cut([tensor.shape for tensor in table.tensors])


def precision_of(part: Part, tensors: Sequence[Tensor]) -> Precision:
    """How workers keep the values of a part."""
    return Precision(part, [tensors[piece.tensor].dtype for piece in part.pieces])


def check_table(table: Table) -> None:
    """Refuse a table that promises more than a shard will hold, before anything is allocated."""
    sizes_fit = len(table.tensors) <= TENSOR_LIMIT and all(
        len(tensor.shape) <= 16 and all(0 <= side <= VALUE_LIMIT for side in tensor.shape)
        for tensor in table.tensors
    )
    if not sizes_fit or sum(math.prod(tensor.shape) for tensor in table.tensors) > VALUE_LIMIT:
        raise JoinError(
            f"the model has more than {TENSOR_LIMIT} tensors or {VALUE_LIMIT} values",
            hint="check the shapes of the parameters that are being trained",
        )
    unknown = next((tensor for tensor in table.tensors if tensor.dtype not in DTYPES), None)
    if unknown is not None:
        raise JoinError(
            f"parameter {unknown.name[:80]!a} is {unknown.dtype[:80]!a}, which shards do not know",
            hint=f"train parameters of {', '.join(DTYPES)}",
        )
    if table.groups > GROUP_LIMIT or any(not 0 <= tensor.group < table.groups for tensor in table.tensors):
        raise JoinError(
            f"a parameter names a group that is not there, or {table.groups} groups are too many",
            hint="check both sides' versions",
        )
    if len(table.layers) > TENSOR_LIMIT or (problem := check_layers(table.layers, len(table.tensors))):
        raise JoinError(
            problem if len(table.layers) <= TENSOR_LIMIT else "the model has too many layers",
            hint="check both sides' versions",
        )
    if len(table.policy) > POLICY_LIMIT:
        raise JoinError("the name of the policy is too long", hint="check both sides' versions")
    if not 0 <= table.clip_norm < math.inf:
        raise JoinError(
            f"the norm to clip to is {table.clip_norm}", hint="give a positive `clip_norm`, or 0 for none"
        )


def first_difference(mine: Table, theirs: Table) -> str:
    """Say where two tables first differ; empty if they do not."""
    for own, other in zip(mine.tensors, theirs.tensors, strict=False):
        if own.name != other.name:
            return f"parameter `{other.name}` where others have `{own.name}`"
        if own.shape != other.shape:
            return f"parameter `{own.name}` has shape {other.shape}, others have {own.shape}"
        if own.dtype != other.dtype:
            return f"parameter `{own.name}` is {other.dtype}, others have {own.dtype}"
        if own.group != other.group:
            return f"parameter `{own.name}` is in group {other.group}, others have it in {own.group}"
    if len(mine.tensors) != len(theirs.tensors):
        longer = max(mine.tensors, theirs.tensors, key=len)
        name = longer[min(len(mine.tensors), len(theirs.tensors))].name
        who = "others have" if longer is mine.tensors else "only this worker has"
        return f"{who} a parameter `{name}`"
    if mine.layers != theirs.layers:
        return f"it shares the statistics of {len(theirs.layers)} layers, others of {len(mine.layers)}"
    if mine.policy != theirs.policy:
        return f"its policy is `{theirs.policy}`, others have `{mine.policy}`"
    if mine.rule != theirs.rule:
        return f"the rule is {theirs.rule}, others have {mine.rule}"
    if (mine.groups, mine.clip_norm) != (theirs.groups, theirs.clip_norm):
        return (
            f"{theirs.groups} groups and clip_norm {theirs.clip_norm}, "
            f"others have {mine.groups} and {mine.clip_norm}"
        )
    return ""
