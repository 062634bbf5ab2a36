"""The switch's schedule with made-up times: order, rate, delay, turns and what is lost."""

import pytest

from shoestring.bench.link.switch import Switch, destination, packet_bytes, queue_bytes

FOREVER = float("inf")


def run_dry(switch):
    """Let time jump from one thing to do to the next; return all arrivals."""
    arrived = []
    while (next_s := switch.next_s()) < FOREVER:
        arrived += switch.advance(next_s)
    return arrived


def packet(mark, size):
    return bytes([mark]) * size


@pytest.mark.parametrize(
    ("rate_mbit_s", "size"), [(0.1, 1500), (10, 1500), (12, 1500), (100, 12_500), (1000, 65_000)]
)
def test_a_packet_is_a_millisecond_of_the_rate(rate_mbit_s, size):
    assert packet_bytes(rate_mbit_s) == size


def test_queues_hold_two_round_trips_or_64_packets():
    assert queue_bytes(10.0, 0.02) == 100_000
    assert queue_bytes(10.0, 0.0) == 96_000
    assert queue_bytes(1000.0, 0.0005) == 64 * 65_000


@pytest.mark.parametrize(
    ("data", "address"),
    [
        (b"\x45" + bytes(15) + bytes([10, 91, 0, 3]) + b"payload", bytes([10, 91, 0, 3])),
        (b"\x45" + bytes(15) + bytes([10, 91, 0, 3]), bytes([10, 91, 0, 3])),
        (b"\x45" + bytes(15) + bytes([10, 91, 0]), b""),  # cut off
        (b"\x60" + bytes(39), b""),  # IPv6
        (b"", b""),
    ],
)
def test_destinations_are_read_from_the_header(data, address):
    assert destination(data) == address


def test_a_packet_pays_for_its_bits_once_and_for_the_delay():
    switch = Switch(3, 8.0, 0.5)  # a byte a microsecond
    switch.offer(0, 2, packet(1, 1000), 10.0)
    assert switch.advance(10.5009) == []
    ((arrived_s, host, data),) = switch.advance(FOREVER)
    assert (host, data) == (2, packet(1, 1000))
    assert arrived_s == pytest.approx(10.501, abs=1e-12)
    assert switch.next_s() == FOREVER


def test_packets_of_a_sender_keep_their_order_and_the_rate():
    switch = Switch(2, 8.0, 0.25)
    for mark in range(50):
        switch.offer(0, 1, packet(mark, 1000), 0.0)
    arrived = run_dry(switch)
    assert [data[0] for _, _, data in arrived] == list(range(50))
    assert [arrived_s for arrived_s, _, _ in arrived] == pytest.approx(
        [0.25 + 1e-3 * (mark + 1) for mark in range(50)], abs=1e-9
    )


def test_ways_do_not_disturb_each_other():
    """A pair's traffic, and the way back, are as fast as if the others were silent."""
    pairs = [(0, 1), (1, 0), (2, 3), (3, 2)]
    switch = Switch(4, 8.0, 0.1)
    for number in range(40):
        for source, target in pairs:
            switch.offer(source, target, packet(number, 1000), 0.0)
    arrived = run_dry(switch)
    for _, target in pairs:
        times = [arrived_s for arrived_s, host, _ in arrived if host == target]
        assert times == pytest.approx([0.1 + 1e-3 * (number + 1) for number in range(40)], abs=1e-9)


def test_a_sender_shares_its_cable_among_receivers():
    switch = Switch(3, 8.0, 0.0)
    for _ in range(20):
        switch.offer(0, 1, packet(1, 1000), 0.0)
        switch.offer(0, 2, packet(2, 1000), 0.0)
    arrived = run_dry(switch)
    assert [host for _, host, _ in arrived] == [1, 2] * 20
    assert arrived[-1][0] == pytest.approx(0.04, abs=1e-9)


def test_senders_share_a_receivers_cable_in_turns():
    switch = Switch(3, 8.0, 0.1)
    for mark in range(30):
        switch.offer(0, 2, packet(mark, 1000), 0.0)
        switch.offer(1, 2, packet(100 + mark, 1000), 0.0)
    arrived = run_dry(switch)
    assert [data[0] for _, _, data in arrived] == [mark + shift for mark in range(30) for shift in (0, 100)]
    assert [arrived_s for arrived_s, _, _ in arrived] == pytest.approx(
        [0.1 + 1e-3 * (place + 1) for place in range(60)], abs=1e-9
    )


def test_a_small_packet_does_not_wait_behind_another_senders_queue():
    switch = Switch(4, 8.0, 0.0)
    for _ in range(40):
        switch.offer(0, 3, packet(0, 1500), 0.0)
        switch.offer(1, 3, packet(1, 1500), 0.0)
    switch.advance(0.02)
    switch.offer(2, 3, packet(2, 100), 0.02)
    arrived = {data[0]: arrived_s for arrived_s, _, data in run_dry(switch) if data[0] == 2}
    # One packet on the line, and one turn of each sender that was there before.
    assert 0.0201 < arrived[2] < 0.02 + 3 * 1.5e-3 + 1e-4 + 1e-9


def test_two_senders_that_never_pause_get_half_each_also_when_packets_are_lost():
    switch = Switch(3, 8.0, 0.0)
    sizes = {0: 1500, 1: 1500}
    arrived = []
    for number in range(2000):  # both send without a pause: twice what the receiver's cable takes
        now_s = number * 1.5e-3
        for source, size in sizes.items():
            switch.offer(source, 2, packet(source, size), now_s)
        arrived += switch.advance(now_s)
    arrived += run_dry(switch)
    got = [sum(data[0] == source for _, _, data in arrived) for source in sizes]
    assert sum(got) + switch.dropped == 4000
    assert switch.dropped > 1500
    assert abs(got[0] - got[1]) <= 64  # what may be left in the queue


def test_a_sender_that_floods_loses_packets_and_one_that_does_not_loses_none():
    switch = Switch(3, 8.0, 0.0)
    arrived = []
    for number in range(1000):
        now_s = number * 1.5e-3
        switch.offer(0, 2, packet(0, 1500), now_s)
        if number % 4 == 0:  # a quarter of the rate, less than its half
            switch.offer(1, 2, packet(1, 1500), now_s)
        arrived += switch.advance(now_s)
    arrived += run_dry(switch)
    assert sum(data[0] == 1 for _, _, data in arrived) == 250
    assert sum(data[0] == 0 for _, _, data in arrived) == 1000 - switch.dropped < 1000


def test_the_newest_is_lost_when_a_senders_queue_is_full():
    switch = Switch(2, 8.0, 0.0)
    room, rest = divmod(switch.queue_bytes, 1300)
    assert rest
    for mark in range(room + 10):
        switch.offer(0, 1, packet(mark, 1300), 0.0)
    assert switch.dropped == 10
    assert [data[0] for _, _, data in run_dry(switch)] == list(range(room))
    switch.offer(0, 1, packet(200, 1300), 1.0)  # there is room again
    assert [data[0] for _, _, data in run_dry(switch)] == [200]
    assert switch.dropped == 10


def test_what_arrives_when_does_not_depend_on_when_it_is_asked():
    """Asked at each event, every 7 ms or once at the end: the same packets at the same times."""
    offers = [
        (number * 4e-4, number % 3, number % 7 == 6, packet(number % 251, 40 + number % 701 * 2))
        for number in range(1400)
    ]

    def run(advance_until):
        switch, arrived = Switch(3, 8.0, 0.01), []
        for now_s, source, target, data in offers:
            arrived += advance_until(switch, now_s)
            switch.offer(source, target, data, now_s)
        arrived += run_dry(switch)
        return sorted(arrived), switch.dropped

    def at_each_event(switch, now_s):
        arrived = []
        while switch.next_s() <= now_s:
            arrived += switch.advance(switch.next_s())
        return arrived

    eager = run(at_each_event)
    assert run(lambda switch, now_s: switch.advance(now_s)) == eager
    assert run(lambda switch, now_s: switch.advance(now_s // 7e-3 * 7e-3)) == eager
    assert run(lambda switch, now_s: []) == eager
    arrived, dropped = eager
    assert 0 < dropped < 700
    assert len(arrived) + dropped == len(offers)
