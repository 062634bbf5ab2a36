"""A model is cut by itself alone, each value is in one part, and shards get about the same."""

import inspect
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoestring.errors import JoinError
from shoestring.model import table as model_table
from shoestring.model.parts import EVEN_FROM, LARGEST, SMALLEST, assign, cut
from shoestring.model.rules import Rule
from shoestring.model.table import Table, Tensor, check_table, first_difference

RESNET_LIKE = [(64, 3, 7, 7), (64,)] + [(512, 512, 3, 3), (512,)] * 12 + [(1000, 512), (1000,)]
WIDE = [(50257, 768), (1024, 768)] + [(2304, 768), (2304,), (768, 768), (3072, 768), (768, 3072)] * 12

sides = st.integers(0, 3000)
shapes = st.lists(
    st.one_of(
        st.just(()),
        st.tuples(sides),
        st.tuples(sides, sides),
        st.tuples(st.integers(0, 60), sides, st.integers(0, 9)),
    ),
    max_size=12,
)


def target_of(shapes) -> int:
    total = sum(math.prod(shape) for shape in shapes)
    if total < EVEN_FROM:
        return max(min(1 << 17, total // 8), SMALLEST)
    return min(total // 20, LARGEST)


def check_cover(shapes) -> None:
    parts = cut(shapes)
    assert [part.index for part in parts] == list(range(len(parts)))
    covered = [0] * len(shapes)
    for part in parts:
        assert part.pieces
        assert part.size == sum(piece.size for piece in part.pieces)
        assert part.size < 2 * target_of(shapes)
        for piece in part.pieces:
            assert piece.start == covered[piece.tensor]  # each value once, in order
            covered[piece.tensor] = piece.stop
            assert math.prod(piece.shape) == piece.size > 0
    assert covered == [math.prod(shape) for shape in shapes]
    order = [(piece.tensor, piece.start) for part in parts for piece in part.pieces]
    assert order == sorted(order)


@settings(max_examples=150)
@given(shapes)
def test_each_value_is_in_one_part(shapes):
    check_cover(shapes)


@pytest.mark.parametrize(
    "shapes",
    [
        [],
        [()],
        [(0,)],
        [(0, 5), (), (3, 0)],
        [(1 << 22,)],
        [(2, 1 << 21)],
        [(3, 5_000_001)],
        [(1, 1, 1 << 22)],
        [(100_000_000, 1)],
        [(7, 30_000)],  # rows just below a part: two of them are nearly two parts
        [(1 << 15,)] * 100,
        RESNET_LIKE,
        WIDE,
    ],
)
def test_each_value_is_in_one_part_of_odd_models(shapes):
    check_cover(shapes)


def test_the_cut_knows_nothing_of_shards():
    assert list(inspect.signature(cut).parameters) == ["shapes"]
    assert cut(WIDE) == cut(tuple(WIDE))


def test_a_tensor_is_cut_between_rows_where_rows_are_small_and_at_whole_blocks_where_not():
    for part in cut([(5000, 1024)]):
        for piece in part.pieces:
            assert piece.start % 1024 == piece.stop % 1024 == 0
            assert piece.shape[1:] == (1024,)
    pieces = [piece for part in cut([(2, 3_000_001)]) for piece in part.pieces]
    assert all(piece.start % 1024 == 0 and len(piece.shape) == 1 for piece in pieces)


def max_over_mean(shapes, shards: int) -> float:
    parts = cut(shapes)
    loads = [0] * shards
    for part, home in zip(parts, assign(parts, shards), strict=True):
        loads[home] += part.size
    return max(loads) * shards / sum(loads)


tensors = st.one_of(
    st.tuples(st.integers(2000, 400_000)),
    st.tuples(st.integers(20, 2000), st.integers(100, 2000)),
    st.tuples(st.sampled_from([64, 256, 512]), st.sampled_from([64, 256, 512]), st.just(3), st.just(3)),
)


@settings(max_examples=100)
@given(st.lists(tensors, min_size=1, max_size=6), st.integers(EVEN_FROM, 4 * EVEN_FROM), st.integers(2, 16))
def test_up_to_16_shards_share_any_model_of_10_mb_evenly(layer, least, shards):
    layers = math.ceil(least / sum(map(math.prod, layer)))
    assert max_over_mean(layer * layers, shards) <= 1.05


@pytest.mark.parametrize(
    "shapes",
    [
        [(EVEN_FROM,)],
        [(1, EVEN_FROM)],
        [(17, 160_000)],  # with a part for each of 17 rows one of 16 shards had two
        [(16, 160_000)],
        [(100_000,)] * 25,
        [(500, 500)] * 10,
        [(2, 40_000)] * 230,
        RESNET_LIKE,
        WIDE,
    ],
)
def test_up_to_16_shards_share_odd_large_models_evenly(shapes):
    assert all(max_over_mean(shapes, shards) <= 1.05 for shards in range(2, 17))


def test_sizes_grow_in_a_large_model_and_are_alike_in_a_small_one():
    """What is pushed last is small; most of what travels does so in 4 MB; nothing is cut for nothing."""
    sizes = [part.size for part in cut(WIDE)]
    assert sizes[0] < LARGEST // 4
    assert sum(size for size in sizes if size > LARGEST // 2) > 0.8 * sum(sizes)
    assert len(sizes) < 1.1 * sum(sizes) / LARGEST + 30
    assert [part.size for part in cut([(1024, 1024)])] == [1 << 17] * 8


@pytest.mark.parametrize("shapes", [RESNET_LIKE, WIDE, [(1 << 15,)] * 7, [(100,)]])
def test_no_shard_holds_more_than_its_share_and_one_part(shapes):
    """The bound: an equal share plus the largest part, for any number of shards."""
    parts = cut(shapes)
    total, largest = sum(part.size for part in parts), max(part.size for part in parts)
    for shards in range(1, 301):
        homes = assign(parts, shards)
        loads = [0] * shards
        for part, home in zip(parts, homes, strict=True):
            loads[home] += part.size
        assert sum(loads) == total
        assert max(loads) <= total / shards + largest
        assert set(homes) == set(range(min(shards, len(parts))))  # the last ones are left empty


def test_equal_parts_go_round():
    parts = cut([(1 << 15,)] * 6)
    assert assign(parts, 1) == (0,) * len(parts)
    assert assign(cut([(100,)]), 5) == (0,)
    assert assign((), 3) == ()


def table(*shapes, rule=Rule("sgd"), groups=1, clip_norm=0.0, group=0) -> Table:  # noqa: B008
    return Table(
        tuple(Tensor(f"t{i}", shape, group) for i, shape in enumerate(shapes)), rule, groups, clip_norm
    )


@pytest.mark.parametrize(
    "bad",
    [
        table((-1,)),
        table((1 << 37,)),
        table((1 << 36,), (1,)),
        table((1 << 35, 1 << 35, 0, 1 << 30)).__class__(
            (Tensor("t", (1 << 36,) * 16, 0),), Rule("sgd"), 1, 0.0
        ),
        table((1,) * 17),
        table((1,), group=1),
        table((1,), group=-1),
        table((1,), groups=0),
        table((1,), groups=1 << 40),
        table(groups=1 << 62),
        table((1,), clip_norm=math.nan),
        table((1,), clip_norm=math.inf),
        table((1,), clip_norm=-1.0),
    ],
)
def test_a_table_that_promises_too_much_is_refused(bad):
    with pytest.raises(JoinError):
        check_table(bad)


def test_too_many_tensors(monkeypatch):
    monkeypatch.setattr(model_table, "TENSOR_LIMIT", 3)
    check_table(table((1,), (), (0,)))
    with pytest.raises(JoinError):
        check_table(table((1,), (1,), (1,), (1,)))


def test_odd_tables_that_are_fine():
    check_table(table())
    check_table(table(groups=0))
    check_table(table((), (0, 1 << 36)))


def test_first_difference_names_it():
    base = table((2, 3), (4,))
    assert first_difference(base, table((2, 3), (4,))) == ""
    assert "`t1` has shape (5,), others have (4,)" in first_difference(base, table((2, 3), (5,)))
    assert first_difference(base, table((2, 3))) == "others have a parameter `t1`"
    assert first_difference(base, table((2, 3), (4,), (1,))) == "only this worker has a parameter `t2`"
    assert "group 1" in first_difference(base, table((2, 3), (4,), group=1))
    assert "momentum=True" in first_difference(base, table((2, 3), (4,), rule=Rule("sgd", momentum=True)))
    assert "2 groups" in first_difference(base, table((2, 3), (4,), groups=2))
    assert "clip_norm 1.0" in first_difference(base, table((2, 3), (4,), clip_norm=1.0))
    other = Table((Tensor("a", (2, 3), 0), *base.tensors[1:]), base.rule, 1, 0.0)
    assert first_difference(base, other) == "parameter `a` where others have `t0`"
