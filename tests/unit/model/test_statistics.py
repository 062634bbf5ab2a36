"""Statistics travel in few bytes, and each batch that was pushed counts once, exactly."""

import dataclasses
import itertools

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoestring.errors import JoinError, WireError
from shoestring.model import parts
from shoestring.model import statkernels as kernels
from shoestring.model.layers import Layer
from shoestring.model.parts import layers_of
from shoestring.model.statistics import History, Statistics, pack, unpack
from shoestring.model.table import Table, Tensor, check_table
from shoestring.wire import messages as say
from tests.model.simulation import Faults, Simulation
from tests.model.test_simulation import RULE, SHAPES
from tests.model.training import Plan
from tests.unit.server.talk import Talk, refusal, table

LAYERS = (Layer("a", 5, 0, 0.8), Layer("b", 7, 0, 0.0), Layer("c", 1, 0, 0.95))
CHANNELS = 13


def seen(*key: int, layers=LAYERS, scale: float = 1.0) -> Statistics:
    """What one worker may have seen, as it is after it has travelled."""
    rng = np.random.default_rng(key)
    channels = sum(layer.channels for layer in layers)
    count = rng.integers(1, 1000, len(layers)).astype(float)
    count[rng.random(len(layers)) < 0.2] = 0  # a layer it did not use
    slopes = rng.standard_normal((2, channels)) * 10.0 ** rng.integers(-9, 3)
    drawn = Statistics(
        np.ones(len(layers)), count, scale * rng.standard_normal(channels), rng.random(channels), *slopes
    )
    return unpack(pack(drawn, layers), layers)


def equal(one: Statistics, other: Statistics) -> bool:
    return all(
        np.array_equal(a, b)
        for a, b in zip(dataclasses.astuple(one), dataclasses.astuple(other), strict=True)
    )


def reference(layers, rounds) -> list[float]:
    """The sums of a history, in plain Python: `rounds` are (batches in worker order, share)."""
    size = sum(layer.channels for layer in layers)
    weight, count = [0.0] * len(layers), [0.0] * len(layers)
    totals = [[0.0] * size for _ in range(4)]
    starts = np.cumsum([0, *(layer.channels for layer in layers)]).tolist()
    for batches, share in rounds:
        for i, layer in enumerate(layers):
            steps = 0.0
            for batch in batches:
                steps += float(batch.weight[i])
            steps = min(share * steps, 1 / (1 - layer.keep))
            left = 1 - (1 - layer.keep) * steps
            weight[i] = left * weight[i] + steps
            count[i] *= left
            for batch in batches:
                count[i] += float(batch.count[i])
            for c in range(starts[i], starts[i + 1]):
                for total in totals:
                    total[c] *= left
                for batch in batches:
                    n, mean = float(batch.count[i]), float(batch.mean[c])
                    values = (mean, float(batch.variance[c]) + mean * mean, batch.shift[c], batch.scale[c])
                    for total, value in zip(totals, values, strict=True):
                        total[c] += n * float(value)
    return [*weight, *count, *itertools.chain(*totals)]


def test_what_travels_is_float32_and_slopes_to_half_a_step() -> None:
    rng = np.random.default_rng(1)
    given_ = Statistics(
        np.array([1.0, 1.0, 3.3]),
        np.array([64.0, 0.0, 7.0]),
        *(rng.standard_normal(CHANNELS) for _ in range(4)),
    )
    given_.variance[:] = np.abs(given_.variance)
    data = pack(given_, LAYERS)
    assert len(data) == 10 * (len(LAYERS) + CHANNELS)
    back = unpack(data, LAYERS)
    for name in ("weight", "count", "mean", "variance"):
        np.testing.assert_array_equal(getattr(back, name), getattr(given_, name).astype(np.float32))
    for name in ("shift", "scale"):
        start = 0
        for layer in LAYERS:
            at = slice(start, start + layer.channels)
            want = getattr(given_, name)[at]
            # The largest has a code of 64 to 127, a step is 1/64 of it at most; clipping costs half of one.
            assert np.abs(getattr(back, name)[at] - want).max() <= np.abs(want).max() / 64
            start += layer.channels
    assert pack(back, LAYERS) == data


@pytest.mark.parametrize("channels", [5, 6, 64, 2048])
def test_a_channel_costs_no_more_than_twelve_bytes(channels: int) -> None:
    layers = (Layer("x", channels, 0, 0.8),)
    assert len(History(layers).pack()) <= 12 * channels


def test_no_layers_no_bytes() -> None:
    history = History(())
    history.take([], 1.0)
    assert history.pack() == b"" == pack(history.statistics(), ())
    assert unpack(b"", ()).count.size == 0


def test_a_history_equals_plain_python_to_the_last_bit() -> None:
    history = History(LAYERS)
    rounds = []
    for seq in range(40):
        batches = [seen(seq, worker) for worker in range(1 + seq % 3)]
        rounds.append((batches, 1 / len(batches)))
        history.take(*rounds[-1])
        assert history.sums.tolist() == reference(LAYERS, rounds)


def test_a_step_fades_layers_that_nobody_used_and_leaves_their_mean() -> None:
    history = History(LAYERS[:1])
    batch = seen(3, layers=LAYERS[:1])
    history.take([batch], 1.0)
    before = history.statistics()
    nothing = dataclasses.replace(batch, count=np.zeros(1))
    for _ in range(3):
        history.take([nothing], 1.0)
    after = history.statistics()
    np.testing.assert_allclose(after.mean, before.mean, rtol=1e-15)
    np.testing.assert_allclose(after.count, before.count * 0.8**3, rtol=1e-15)
    np.testing.assert_allclose(after.weight, 1 + 0.8 + 0.8**2 + 0.8**3, rtol=1e-15)


def change(place: int, value: float) -> bytes:
    data = bytearray(pack(seen(5), LAYERS))
    data[4 * place : 4 * place + 4] = np.array([value], "<f4").tobytes()
    return bytes(data)


WEIGHT, COUNT, MEAN, VARIANCE = 0, 3, 6, 6 + CHANNELS
GOOD = pack(seen(5), LAYERS)
SLOPE = 8 * (len(LAYERS) + CHANNELS)
HOSTILE = {
    "short": GOOD[:-1],
    "long": GOOD + b"\0",
    "one byte": b"\0",
    "nan mean": change(MEAN, np.nan),
    "infinite mean": change(MEAN + 1, -np.inf),
    "huge mean": change(MEAN, 2.0**61),
    "nan variance": change(VARIANCE, np.nan),
    "negative variance": change(VARIANCE + 12, -1e-3),
    "huge variance": change(VARIANCE, 2.0**121),
    "nan count": change(COUNT, np.nan),
    "negative count": change(COUNT, -1),
    "huge count": change(COUNT, 2.0**41),
    "infinite count": change(COUNT, np.inf),
    "nan weight": change(WEIGHT, np.nan),
    "negative weight": change(WEIGHT, -1),
    "more steps than are remembered": change(WEIGHT, 5.1),
    "a count of no step": change(WEIGHT, 0),
    "huge slope": GOOD[:SLOPE] + b"\x7f" + GOOD[SLOPE + 1 :],
    "tiny slope": GOOD[:SLOPE] + b"\x80" + GOOD[SLOPE + 1 :],
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_hostile_statistics_are_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        unpack(data, LAYERS)


def floats(low: float, high: float):
    return st.floats(low, high, width=32)


numbers = st.tuples(
    floats(0, 5),
    floats(0, 2.0**41),
    *[floats(-(2.0**61), 2.0**61)] * 3,
    *[floats(0, 2.0**121)] * 3,
    st.binary(min_size=8, max_size=8),
)


@settings(max_examples=300)
@given(numbers)
def test_whatever_is_taken_leads_to_answers_that_are_taken(drawn) -> None:
    """So no worker can stop the others with numbers that a shard lets pass."""
    layers = (Layer("x", 3, 0, 0.8),)
    history = History(layers)
    history.take([seen(1, layers=layers)], 1.0)
    try:
        hostile = unpack(np.array(drawn[:-1], "<f4").tobytes() + drawn[-1], layers)
    except WireError:
        return
    for _ in range(3):
        history.take([hostile, seen(2, layers=layers)], 0.5)
    assert np.isfinite(history.sums).all()
    unpack(history.pack(), layers)


def test_the_largest_values_that_are_taken_lead_to_answers_that_are_taken() -> None:
    layers = (Layer("x", 2, 0, 0.8),)
    history = History(layers)

    def huge(sign: int, weight: float, count: float) -> Statistics:
        mean, variance = np.full(2, sign * kernels.MEAN_LIMIT), np.full(2, kernels.VARIANCE_LIMIT)
        slopes = np.full(2, 127 * 2.0**100), np.full(2, -127 * 2.0**100)
        batch = Statistics(np.array([weight]), np.array([count]), mean, variance, *slopes)
        return unpack(pack(batch, layers), layers)

    most = 5.0000045  # as much above 5 steps as rounding is allowed to be
    for weight in (1.0, most):
        for count in (kernels.COUNT_LIMIT, kernels.COUNT_LIMIT, 0.0):
            history.take([huge(1, weight, count), huge(-1, weight, count)], 0.5)
            unpack(history.pack(), layers)


def test_flipped_bits_are_refused_or_harmless() -> None:
    rng = np.random.default_rng(9)
    taken = 0
    for _ in range(3000):
        data = bytearray(GOOD)
        for _ in range(rng.integers(1, 4)):
            data[rng.integers(len(data))] ^= 1 << rng.integers(8)
        history = History(LAYERS)
        try:
            history.take([unpack(bytes(data), LAYERS)] * 2, 0.5)
        except WireError:
            assert not history.sums.any()
            continue
        taken += 1
        unpack(history.pack(), LAYERS)
    assert 300 < taken < 2900


SHARING = msgspec.structs.replace(table(), layers=LAYERS)


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_a_shard_refuses_hostile_statistics_and_nothing_changes(data: bytes) -> None:
    talk = Talk(model=SHARING).begin()
    history = talk.shard.parts[0].holding.history
    talk.round(1, statistics=b"")
    talk.push(0, 0, 2, statistics=GOOD)
    before = history.sums.tobytes(), talk.params()
    assert refusal(talk.push(0, 1, 2, statistics=data)).message
    assert talk.work() == []
    assert (history.sums.tobytes(), talk.params()) == before
    talk.push(0, 1, 2, statistics=GOOD)  # it may still send the right ones, and they count once
    talk.work()
    assert history.sums.tolist() == reference(LAYERS, [([unpack(GOOD, LAYERS)] * 2, 0.5)])


def test_statistics_for_a_part_without_layers_are_refused() -> None:
    talk = Talk(model=SHARING).begin()
    refusal(talk.push(1, 0, 1, statistics=GOOD))


def test_a_push_that_is_repeated_or_skipped_counts_once() -> None:
    talk = Talk(model=SHARING).begin()
    history = talk.shard.parts[0].holding.history
    for _ in range(3):
        talk.push(0, 0, 1, statistics=GOOD)
    talk.push(0, 1, 1, statistics=GOOD, skip=True)  # a gradient with NaN; the statistics are sound
    said = talk.work()
    want = reference(LAYERS, [([unpack(GOOD, LAYERS)] * 2, 0.5)])
    assert history.sums.tolist() == want
    assert {message.statistics for _, message in said} == {history.pack()}
    talk.push(0, 0, 1, statistics=GOOD)
    talk.work()
    [(_, again)] = talk.tell(0, say.Ask(0, 1, 0))
    assert again.statistics == history.pack()
    assert history.sums.tolist() == want


def test_a_worker_that_joins_gets_the_history_with_its_parameters() -> None:
    talk = Talk(model=SHARING).begin()
    for part in (0, 1):
        for worker in (0, 1):
            talk.push(part, worker, 1, statistics=GOOD if part == 0 else b"")
    talk.work()
    talk.enter(1, first=2, life=2)
    [(_, full)] = talk.tell(1, say.Pull(0, 1), life=2)
    assert full.statistics == talk.shard.parts[0].holding.history.pack() != b""


@pytest.mark.parametrize(
    "layer",
    [
        Layer("x", 0, 0, 0.8),
        Layer("x", -5, 0, 0.8),
        Layer("x", (1 << 16) + 1, 0, 0.8),
        Layer("x", 5, 3, 0.8),
        Layer("x", 5, -1, 0.8),
        Layer("x", 5, 0, 1.0),
        Layer("x", 5, 0, -0.1),
        Layer("x", 5, 0, float("nan")),
    ],
    ids=str,
)
def test_a_table_with_bad_layers_is_refused(layer: Layer) -> None:
    with pytest.raises(JoinError, match="`x`"):
        check_table(msgspec.structs.replace(table(), layers=(layer,)))
    check_table(msgspec.structs.replace(table(), layers=(Layer("x", 1 << 16, 2, 0.0),)))


def test_a_table_with_too_many_channels_is_refused_before_anything_is_made_of_it() -> None:
    with pytest.raises(JoinError, match="more channels"):
        check_table(msgspec.structs.replace(table(), layers=(Layer("x", 1 << 16, 0, 0.8),) * 64))


class SharingSimulation(Simulation):
    """Every push carries statistics; what the shards make of them is compared with what was applied.

    One worker is killed at every tenth step and started again.
    """

    def __init__(self, *args, victim: int | None = None) -> None:
        self.rounds: dict[int, list] = {}  # of each part, as applied: (batches in worker order, share)
        self.packed: dict[tuple[int, int], bytes] = {}
        self.victim, self.kill_at, self.killed = victim, 10, 0
        super().__init__(*args)

    def _start(self, number: int) -> None:
        super()._start(number)
        worker = self.workers[b"%d.%d" % (number, self.lives[number])]
        send = worker.send

        def send_with_statistics(shard, message, payload):
            if isinstance(message, say.Push):
                layers = self.layers(message.part)
                own = seen(message.part, number, message.incarnation, message.seq, layers=layers)
                message.statistics = pack(own, layers)
            send(shard, message, payload)

        worker.send = send_with_statistics

    def layers(self, part: int):
        return layers_of(self.plan.parts[part], self.plan.table.layers)

    def _event(self) -> None:
        super()._event()
        for identity, worker in list(self.workers.items()):
            if worker.number == self.victim and worker.seq >= self.kill_at and not worker.is_over:
                self.kill_at += 10
                self.killed += 1
                self._restart(identity)

    def _end_work(self, place: int) -> None:
        shard, work, is_run = self.works[place]
        if not is_run:
            work.run()
            self.works[place] = (shard, work, True)
        if work.reply is not None:
            part = work.rounds.holding.part.index
            batches = [
                seen(part, item.worker, item.push.incarnation, work.seq, layers=self.layers(part))
                for item in work.contributions
            ]
            share = 1 / len(batches) if work.is_whole else 1 / self.plan.workers
            self.rounds.setdefault(part, []).append((batches, share))
            self.packed[part, work.reply.version] = work.rounds.holding.history.pack()
        super()._end_work(place)

    def _post(self, index: int) -> None:
        for _, message, _ in self.shards[index].outbox:
            if isinstance(message, say.Full | say.Delta) and message.version:
                assert message.statistics == self.packed[message.part, message.version]
        super()._post(index)


SHARED = Table(
    tuple(Tensor(f"t{index}", shape, 0) for index, shape in enumerate(SHAPES)),
    RULE,
    1,
    0.0,
    (Layer("a", 5, 0, 0.8), Layer("b", 3, 1, 0.8), Layer("c", 9, 5, 0.5), Layer("d", 2, 5, 0.95)),
)


@pytest.mark.parametrize("bound", [say.WHOLE_ROUND, 2])
@pytest.mark.parametrize("seed", range(3))
def test_killed_workers_and_lost_messages_leave_the_sum_of_what_was_applied(
    monkeypatch: pytest.MonkeyPatch, seed: int, bound: int
) -> None:
    monkeypatch.setattr(parts, "SMALLEST", 128)
    plan = Plan(SHARED, workers=3, shards=2, rounds=32, bound=bound, delay=seed % 2)
    faults = Faults(drop=0.03, repeat=0.05, reset=0.002, hurry=0.01, lease_s=60.0)
    simulation = SharingSimulation(plan, faults, seed, victim=1).run()
    assert simulation.killed == 3
    histories = {rounds.holding.part.index: rounds.holding.history for rounds in simulation.all_rounds()}
    assert sum(len(history.layers) for history in histories.values()) == 4
    for part, history in histories.items():
        assert history.sums.tolist() == reference(history.layers, simulation.rounds[part])
    applied = sum(len(batches) for rounds in simulation.rounds.values() for batches, _ in rounds)
    assert applied == len(simulation.applied) == len(set(simulation.applied))
    assert simulation.acked <= set(simulation.applied)
