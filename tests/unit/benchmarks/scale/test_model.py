"""The model of a round against times worked out by hand, and its fast form against the plain one."""

import math
import random
from dataclasses import replace

import pytest

from benchmarks.scale.costs import Costs, Crowd, Price
from benchmarks.scale.model import (
    BEAT_S,
    CARRIED_BYTES,
    FRAME_BYTES,
    Cluster,
    beat_loads,
    limit_s,
    simulate,
    stretch,
)

FREE = Costs("float32", *[Price()] * 7, 0.0, *[Price()] * 2)
# On such a line a byte takes a second.
SECOND_A_BYTE = 8 * FRAME_BYTES / CARRIED_BYTES
SERVICES = ("encode", "apply", "worker_io", "shard_io", "service", "gather", "update")


def cluster(workers=1, homes=(0,), shards=None, **more):
    given = {"latency_s": 0.0, "is_one_machine": True, "threads": 1} | more
    shards = max(homes) + 1 if shards is None else shards
    return Cluster(workers, shards, (1,) * len(homes), tuple(homes), **given)


def fixed(**seconds):
    return replace(FREE, **{name: Price(value) for name, value in seconds.items()})


def test_one_worker_and_one_shard_do_one_thing_after_the_other():
    costs = fixed(encode=1, worker_io=2, shard_io=3, service=4, gather=5, update=6, apply=7)
    outcome = simulate(cluster(rate_bits_s=1.0, latency_s=100.0), costs)  # its own host: no line
    assert outcome.round_s == 1 + 2 + 3 + 4 + (5 + 6) + 4 + 3 + 2 + 7
    assert outcome.shard_s == 2 * (3 + 4) + 5 + 6
    assert outcome.busy_s == {
        "encode": 1, "apply": 7, "worker_io": 4, "shard_io": 6, "service": 8, "update": 11,
        "link_out": 0, "link_in": 0,
    }  # fmt: skip
    assert outcome.bottleneck == "update"


def test_a_price_is_a_line():
    sized = replace(cluster(), parts=(1000,))
    assert simulate(sized, replace(FREE, encode=Price(1.0, 0.5))).round_s == 501
    # By byte, of which a push has 20 and an answer 10.
    costs = replace(FREE, up=Price(20), down=Price(0, 0.01), worker_io=Price(1, 2))
    assert simulate(sized, costs).round_s == (1 + 40) + (1 + 20)


@pytest.mark.parametrize(("workers", "expected"), [(1, 0.0), (2, 31.0), (3, 61.0), (4, 91.0)])
def test_lines_carry_one_message_after_the_other(workers, expected):
    costs = fixed(up=10, down=20)
    outcome = simulate(cluster(workers, rate_bits_s=SECOND_A_BYTE, latency_s=0.5), costs)
    # Pushes of 10 s each come in one after the other, then answers of 20 s each leave so.
    assert outcome.round_s == pytest.approx(expected, abs=1e-9)
    others = workers - 1
    assert outcome.sent_bytes == [20 * others, *[10] * others]
    assert outcome.received_bytes == [10 * others, *[20] * others]


def test_a_round_waits_for_the_last_push():
    # Two workers, both encode for 3; the shard takes 1 for each, then updates 2 * 4 + 1.
    costs = fixed(encode=3, service=1, gather=4, update=1)
    assert simulate(cluster(2), costs).round_s == 3 + 2 + 9 + 2


def test_answers_are_applied_once_everything_is_sent():
    costs = fixed(encode=10, apply=1)
    assert simulate(cluster(homes=(0, 0)), costs).round_s == 10 + 10 + 1 + 1


@pytest.mark.parametrize(("threads", "expected"), [(1, 15.0), (2, 10.0), (3, 5.0)])
def test_parts_are_updated_side_by_side(threads, expected):
    assert simulate(cluster(homes=(0, 0, 0), threads=threads), fixed(update=5)).round_s == expected


@pytest.mark.parametrize("workers", [2, 4, 8])
def test_every_host_carries_what_the_formula_says(workers):
    costs = fixed(up=30, down=50)
    homes = tuple(range(workers)) * 3
    outcome = simulate(cluster(workers, homes, rate_bits_s=SECOND_A_BYTE), costs)
    carried = (workers - 1) / workers * len(homes) * (30 + 50)
    assert outcome.sent_bytes == outcome.received_bytes == [carried] * workers
    least = limit_s(workers, len(homes) * 30, len(homes) * 50, SECOND_A_BYTE)
    assert least == pytest.approx(carried * CARRIED_BYTES / FRAME_BYTES)
    assert outcome.round_s >= carried


def test_few_parts_on_many_hosts_make_the_holders_carry_more():
    outcome = simulate(cluster(10, (0, 1)), fixed(up=30, down=50))
    assert outcome.sent_bytes == [30 + 9 * 50] * 2 + [2 * 30] * 8
    assert outcome.received_bytes == [50 + 9 * 30] * 2 + [2 * 50] * 8


def random_case(seed):
    draw = random.Random(seed)
    costs = fixed(**{name: draw.uniform(0, 2) for name in SERVICES}, up=draw.random(), down=draw.random())
    homes = tuple(draw.randrange(3) for _ in range(6))
    rate = SECOND_A_BYTE * draw.choice([0.3, 1.0, 10.0])
    return replace(cluster(40, homes, rate_bits_s=rate, threads=2), latency_s=draw.random()), costs


@pytest.mark.parametrize("seed", range(4))
def test_workers_that_move_as_one_take_what_each_by_itself_takes(seed):
    given, costs = random_case(seed)
    plain = simulate(given, costs)
    assert simulate(given, costs, groups=given.workers).round_s == plain.round_s
    grouped = simulate(given, costs, groups=10)
    for kind, busy_s in plain.busy_s.items():
        assert grouped.busy_s[kind] == pytest.approx(busy_s)
    # A station waits for a whole group where it could have begun with its first member: once
    # for each station that a part passes on a shard and on its way there and back.
    most = max(math.ceil((given.workers - given.holders) / 10), 1)
    line_s = 8 * FRAME_BYTES / CARRIED_BYTES / given.rate_bits_s * (costs.up.fixed + costs.down.fixed)
    passed = line_s + 2 * (costs.shard_io.fixed + costs.service.fixed)
    assert abs(grouped.round_s - plain.round_s) <= (most - 1) * len(given.parts) * passed


def test_where_one_station_is_all_a_group_changes_nothing():
    given = cluster(100, (0,))
    for name in ("service", "shard_io"):
        costs = fixed(**{name: 1.0})
        assert simulate(given, costs, groups=7).round_s == simulate(given, costs).round_s == 200


@pytest.mark.parametrize(("workers", "cores", "expected"), [(1, 1, 10), (2, 1, 20), (2, 2, 10), (3, 2, 15)])
def test_threads_share_the_cores_of_a_machine(workers, cores, expected):
    outcome = simulate(cluster(workers), fixed(encode=10), is_recorded=True)
    assert outcome.round_s == 10
    assert stretch(outcome, cores) == expected


def test_what_is_done_alone_is_not_stretched():
    # Three encode on two cores; then one thread updates while the others wait.
    outcome = simulate(cluster(3), fixed(encode=10, update=4), is_recorded=True)
    assert stretch(outcome, 2) == 15 + 4


def test_beats_slow_a_shard_down_until_nothing_else_is_done():
    given = cluster(10, is_one_machine=False)
    light = replace(fixed(service=1.0), crowd=Crowd(message_s=0.01 * BEAT_S))
    assert beat_loads(given, light) == (0.2, 0.0)
    assert simulate(given, light).round_s == pytest.approx(2 * 10 * 1.0 / 0.8)
    assert simulate(replace(given, is_one_machine=True), light).round_s == 2 * 10
    outcome = simulate(given, replace(light, crowd=Crowd(message_s=0.05 * BEAT_S)))
    assert (outcome.round_s, outcome.bottleneck) == (math.inf, "beats")


def test_a_large_run_costs_more_for_each_message():
    crowd = Crowd(member_s=1.0, look_s=2.0, poll_s=3.0)
    costs = replace(FREE, crowd=crowd)
    # One worker, five shards: 5 * 2 to encode, 1 to serve, 5 * (2 + 3) to hear.
    assert simulate(cluster(1, shards=5), costs).round_s == 10 + 1 + 25


def test_a_shard_is_woken_only_where_it_had_nothing_to_do():
    costs = replace(fixed(service=1.0, update=10.0), wake_s=100.0)
    apart = cluster(2, is_one_machine=False)
    # Both pushes come at once; then the update ends, and both answers leave.
    assert simulate(apart, costs).round_s == (100 + 2) + 10 + (100 + 2)
    assert simulate(replace(apart, is_one_machine=True), costs).round_s == (200 + 2) + 10 + (100 + 2)
