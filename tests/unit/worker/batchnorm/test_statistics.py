"""What a worker takes to be the others' statistics is what the others sent, and nothing of its own."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from shoestring.errors import SnapshotError, WireError
from shoestring.model.layers import Layer
from shoestring.model.parts import cut
from shoestring.model.statistics import History, Statistics, unpack
from shoestring.worker.batchnorm.layers import SharedBatchNorm, share_batchnorm
from shoestring.worker.batchnorm.normalise import Seen
from shoestring.worker.batchnorm.statistics import REACH, SharedStatistics

LAYERS = (Layer("a", 5, 0, 0.8), Layer("b", 3, 1, 0.8), Layer("c", 4, 1, 0.0))
SHAPES = ((5, 4), (3,))
PARTS = cut(SHAPES)  # one
HALF = 1 / 64  # of the largest slope of a layer: what travelling may change, twice over


def make_worker(
    workers: int = 3, layers=LAYERS, **settings
) -> tuple[SharedStatistics, list[SharedBatchNorm]]:
    modules = [share_batchnorm(nn.BatchNorm1d(layer.channels)) for layer in layers]
    return SharedStatistics(layers, modules, PARTS, workers=workers, **settings), modules


def seen(*key: int, channels: int, count: int | None = None) -> Seen:
    rng = np.random.default_rng(key)
    mean, variance, shift, scale = rng.standard_normal((4, channels)).astype(np.float32)
    return Seen.of(count or int(rng.integers(1, 50)), mean, np.abs(variance), shift, scale)


class Run:
    """Some workers and the history a shard would keep, without a network."""

    def __init__(self, workers: int, layers=LAYERS, **settings) -> None:
        self.layers = layers
        self.workers = [make_worker(workers, layers, warmup=0, **settings) for _ in range(workers)]
        self.history = History(layers)
        self.apart = [History(layers) for _ in range(workers)]  # each without one worker's pushes
        self.version = 0

    def note(self, worker: int, layer: int, batch: Seen) -> None:
        self.workers[worker][1][layer].record.note(batch)

    def round(self, weights: tuple[float, ...] | None = None) -> None:
        """A whole round."""
        self.version += 1
        count = len(self.workers)
        pushed = [
            unpack(one.take(0, self.version, (weights or (1.0,) * count)[worker]), self.layers)
            for worker, (one, _) in enumerate(self.workers)
        ]
        self.history.take(pushed, 1 / count)
        for worker, history in enumerate(self.apart):
            silent = Statistics(pushed[worker].weight, np.zeros(len(self.layers)), *[np.zeros(12)] * 4)
            history.take([silent if i == worker else batch for i, batch in enumerate(pushed)], 1 / count)
        for one, _ in self.workers:
            one.hear(0, self.version, self.version, self.history.pack())

    def check_others(self, worker: int, scale: float = 1.0) -> None:
        """What a worker knows of the others, against the history without it."""
        want, start = self.apart[worker].statistics(), 0
        for index, layer in enumerate(self.layers):
            at = slice(start, start + layer.channels)
            start += layer.channels
            others = self.workers[worker][1][index].record.others
            if want.count[index] == 0:
                assert others is None
                continue
            a_step = want.count[index] / want.weight[index]
            assert others.count == pytest.approx(a_step * min(want.weight[index], REACH), rel=1e-5)
            # Roundings of the whole's float32, times the whole by the others' share of it.
            grown = 1 + self.history.statistics().count[index] / want.count[index]
            for name in ("mean", "variance"):
                np.testing.assert_allclose(getattr(others, name), getattr(want, name)[at], atol=1e-6 * grown)
            for name in ("shift", "scale"):
                most = np.abs(getattr(self.history.statistics(), name)[at]).max()
                np.testing.assert_allclose(
                    scale * getattr(others, name), getattr(want, name)[at], atol=HALF * most * grown
                )


def test_others_are_the_history_less_what_the_worker_sent_itself() -> None:
    run = Run(3)
    for step in range(30):
        for worker in range(3):
            for layer, spec in enumerate(LAYERS):
                run.note(worker, layer, seen(step, worker, layer, channels=spec.channels))
        run.round()
        for worker in range(3):
            run.check_others(worker)


def test_layers_that_some_workers_do_not_use_in_some_steps() -> None:
    """A worker that leaves a layer alone for long must not take its old share from the others' new one."""
    run = Run(3)
    draw = random.Random(4)
    for step in range(80):
        used = {(worker, layer) for worker in range(3) for layer in range(3) if draw.random() < 0.5}
        if 20 <= step < 45:
            used -= {(0, 0), (1, 0)}
        if 50 <= step < 60:
            used -= {(worker, 1) for worker in range(3)}
        for worker, layer in sorted(used):
            channels = LAYERS[layer].channels
            run.note(worker, layer, seen(step, worker, layer, channels=channels, count=20))
        run.round()
        for worker in range(3):
            run.check_others(worker)


def test_nan_in_a_batch_leaves_that_layers_history_alone_and_the_others_count() -> None:
    run = Run(2)
    for step in range(4):
        for worker in range(2):
            for layer, spec in enumerate(LAYERS):
                batch = seen(step, worker, layer, channels=spec.channels)
                if step == 3 and worker == 0 and layer == 1:
                    batch.sums[0, 1] = float("nan")
                run.note(worker, layer, batch)
        before = run.history.statistics()
        run.round()
    after = run.history.statistics()
    assert np.isfinite(run.history.sums).all()
    want = 0.8 * before.count[1] + seen(3, 1, 1, channels=3).count
    assert after.count[1] == pytest.approx(want, rel=1e-12)
    assert after.count[0] > 0.8 * before.count[0] + seen(3, 1, 0, channels=5).count
    run.check_others(0)
    run.check_others(1)


def test_values_that_ran_away_do_not_end_a_run() -> None:
    one, modules = make_worker(2)
    mean, variance, shift = np.zeros(5), np.ones(5), np.zeros(5)
    mean[0], mean[1], variance[2], shift[0] = 1e30, -1e38, 1e38, 3e38
    batch = Seen.of(4, mean, variance, shift, shift)
    modules[0].record.note(batch)
    assert unpack(one.take(0, 1, 1e20), LAYERS).count[0] == batch.count


@pytest.mark.parametrize("weights", [(1.0, 1.0), (4.0, 0.5), (32.0, 96.0)])
def test_slopes_count_as_gradients_do(weights: tuple[float, float]) -> None:
    """A worker's gradient is multiplied by its weight later: what it takes in of others is divided by it."""
    run = Run(2)
    for step in range(5):
        for worker in range(2):
            for layer, spec in enumerate(LAYERS):
                run.note(worker, layer, seen(step, worker, layer, channels=spec.channels))
        run.round(weights)
    for worker in range(2):
        run.check_others(worker, scale=weights[worker])


def test_micro_batches_count_as_one_batch() -> None:
    parts = [seen(1, 2, channels=5), seen(1, 3, channels=5), seen(1, 4, channels=5)]
    one, modules = make_worker()
    for part in parts:
        modules[0].record.note(part)
    got = unpack(one.take(0, 1, 1.0), LAYERS)
    counts = np.array([part.count for part in parts])
    assert (got.weight[0], got.count[0]) == (1.0, counts.sum())
    mean, square, _, _ = sum(part.sums for part in parts) / counts.sum()
    np.testing.assert_allclose(got.mean[:5], mean, rtol=1e-6)
    np.testing.assert_allclose(got.variance[:5], square - mean**2, rtol=1e-6)


@pytest.mark.parametrize("h", [1, 2, 5])
def test_local_steps_fade_as_rounds_would(h: int) -> None:
    """So many local steps and one round leave the history that as many rounds would."""
    local, every = Run(2, is_local=True), Run(2)
    for step in range(20):
        for worker in range(2):
            for layer, spec in enumerate(LAYERS):
                if (step + layer) % 3:
                    for run in (local, every):
                        run.note(worker, layer, seen(step, worker, layer, channels=spec.channels))
        every.round()
        if step % h == h - 1:
            local.round()
        else:
            for one, _ in local.workers:
                one.next_step()
    got, want = local.history.statistics(), every.history.statistics()
    np.testing.assert_allclose(got.weight, want.weight, rtol=1e-6)
    np.testing.assert_allclose(got.count, want.count, rtol=1e-6)
    np.testing.assert_allclose(got.mean, want.mean, atol=1e-6)
    np.testing.assert_allclose(got.variance, want.variance, atol=1e-5)
    assert local.workers[0][1][0].record.others.is_local
    assert not every.workers[0][1][0].record.others.is_local


@pytest.mark.parametrize("answers", ["each", "at once"])
def test_pushes_that_wait_for_nobody(answers: str) -> None:
    """Every push is a version; a worker hears all that came since its last one, singly or as a whole."""
    layers, workers = LAYERS[:1], 4
    run = Run(workers, layers)
    own = [History(layers) for _ in range(workers)]
    draw, versions = random.Random(7), []
    heard = [0] * workers
    for seq in range(1, 60):
        for worker in draw.sample(range(workers), workers):
            run.note(worker, 0, seen(seq, worker, channels=5, count=16))
            one, modules = run.workers[worker]
            batch = unpack(one.take(0, seq, 1.0), layers)
            for other, history in enumerate(own):
                silent = Statistics(batch.weight, np.zeros(1), *[np.zeros(5)] * 4)
                history.take([batch if other == worker else silent], 1 / workers)
            run.history.take([batch], 1 / workers)
            versions.append(run.history.pack())
            first = heard[worker] if answers == "each" else len(versions) - 1
            for version in range(first, len(versions)):
                one.hear(0, version + 1, seq, versions[version], is_whole=False)
            heard[worker] = len(versions)
            if seq < 3:
                continue
            every, mine = run.history.statistics(), own[worker].statistics()
            others = modules[0].record.others
            count = every.count[0] - mine.count[0]
            # Heard singly, its own push seems to come first instead of last: up to a step's fading.
            rel = 1e-5 if answers == "at once" else 0.2 * mine.count[0] / count
            reach = min(every.weight[0], REACH)
            assert others.count == pytest.approx(reach * count / every.weight[0], rel=rel)
            want = (every.count[0] * every.mean - mine.count[0] * mine.mean) / count
            assert np.abs(others.mean - want).max() <= (1e-5 if answers == "at once" else 0.4)


def test_an_answer_that_stands_for_earlier_ones_takes_their_pushes_too() -> None:
    layers = LAYERS[:1]
    one, modules = make_worker(2, layers, warmup=0)
    whole = History(layers)
    for seq in (1, 2):
        modules[0].record.note(seen(seq, channels=5))
        whole.take([unpack(one.take(0, seq, 1.0), layers)], 0.5)
    one.hear(0, 2, 2, whole.pack(), is_whole=False)  # the answer to the first brought nothing new
    assert modules[0].record.others is None
    whole.take([unpack(make_other(layers), layers)], 0.5)
    one.hear(0, 3, 2, whole.pack(), is_whole=False)
    other = unpack(make_other(layers), layers)
    np.testing.assert_allclose(modules[0].record.others.mean, other.mean, rtol=1e-4)


def make_other(layers) -> bytes:
    other, modules = make_worker(2, layers)
    modules[0].record.note(seen(9, channels=5))
    return other.take(0, 1, 1.0)


def test_statistics_are_trusted_more_and_more_over_the_warm_up() -> None:
    other, modules = make_worker(2, LAYERS[:1], warmup=100)
    history = History(LAYERS[:1])
    for _ in range(30):
        history.take([unpack(make_other(LAYERS[:1]), LAYERS[:1])], 1.0)
    full = None
    for version in (400, 100, 50, 1):
        other.hear(0, version, 0, history.pack())
        full = full or modules[0].record.others.count
        assert modules[0].record.others.count == pytest.approx(full * min(version / 100, 1))
    assert full == pytest.approx(REACH * seen(9, channels=5).count, rel=1e-6)


def test_running_statistics_are_those_of_all_and_alike_on_every_worker() -> None:
    run = Run(3)
    for step in range(6):
        for worker in range(3):
            for layer, spec in enumerate(LAYERS):
                if worker or step % 2:  # one worker does not use the layers in every step
                    run.note(worker, layer, seen(step, worker, layer, channels=spec.channels))
        run.round()
        buffers = [
            [b for m in modules for b in (m.running_mean, m.running_var)] for _, modules in run.workers
        ]
        for other in buffers[1:]:
            assert all(map(torch.equal, other, buffers[0]))
    whole, start = run.history.statistics(), 0
    for index, layer in enumerate(LAYERS):
        at, n = slice(start, start + layer.channels), whole.count[index]
        start += layer.channels
        np.testing.assert_allclose(buffers[0][2 * index], whole.mean[at], rtol=1e-6)
        np.testing.assert_allclose(buffers[0][2 * index + 1], whole.variance[at] * n / (n - 1), rtol=1e-6)


def test_layers_without_buffers_have_none_to_set() -> None:
    module = share_batchnorm(nn.BatchNorm1d(5, track_running_stats=False, affine=False))
    one = SharedStatistics(LAYERS[:1], [module], PARTS, workers=2)
    one.hear(0, 1, 0, make_other(LAYERS[:1]))
    assert module.running_mean is None
    assert module.record.others is not None


def test_alone_nothing_is_sent_or_changed() -> None:
    one, modules = make_worker(1)
    assert all(module.record is None for module in modules)
    assert one.take(0, 1, 1.0) == b""
    one.hear(0, 1, 1, b"anything")
    assert one.state() == {}


def test_an_answer_that_is_damaged_is_refused() -> None:
    one, _ = make_worker(2)
    with pytest.raises(WireError):
        one.hear(0, 1, 1, b"anything")


def test_a_checkpoint_holds_the_workers_share_and_weight() -> None:
    run = Run(2)
    for step in range(5):
        for worker in range(2):
            for layer, spec in enumerate(LAYERS):
                run.note(worker, layer, seen(step, worker, layer, channels=spec.channels))
        run.round((4.0, 2.0))
    state = run.workers[0][0].state()
    again, modules = make_worker(2, warmup=0)
    again.load(state)
    again.hear(0, run.version, 0, run.history.pack())
    for own, want in zip(modules, run.workers[0][1], strict=True):
        got, had = own.record.others, want.record.others
        assert got.count == had.count
        for name in ("mean", "variance", "shift", "scale"):
            np.testing.assert_array_equal(getattr(got, name), getattr(had, name))


def test_a_checkpoint_of_other_layers_is_left_alone_and_a_broken_one_refused() -> None:
    one, _ = make_worker(2)
    state = one.state()
    (name,) = [name for name in state if name != "statistics.weight"]
    other, _ = make_worker(2, (LAYERS[0], LAYERS[1], Layer("c", 4, 1, 0.5)))
    other.load({name: np.ones_like(state[name])})
    assert not other.state()[next(iter(other.state()))].any()
    for broken in (np.zeros(3), np.full_like(state[name], np.nan)):
        with pytest.raises(SnapshotError, match="statistics.00000"):
            one.load({name: broken})
