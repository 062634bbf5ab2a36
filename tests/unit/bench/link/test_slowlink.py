"""The link's schedule with made-up times, and the relay's bytes on real sockets.

Nothing here depends on how fast the machine is: a deadline only ends a test that
would otherwise hang.
"""

import contextlib
import itertools
import random
import socket
import threading

import pytest

from shoestring.bench.link.slowlink import QUEUE_BYTES, Direction, Lane, Line, SlowLink
from shoestring.errors import LinkError, UsageError

DEADLINE_S = 60.0


def test_a_chunk_keeps_the_line_for_its_bits():
    line = Line(8.0)  # a byte a microsecond
    assert line.depart(10.0, 1_000_000) == 11.0
    assert line.depart(10.25, 500_000) == 11.5  # waits for the first
    assert line.depart(20.0, 250_000) == 20.25  # the line was idle: that time is gone
    assert line.free_at_s == 20.25


def test_a_late_wake_up_does_not_lower_the_rate():
    line = Line(8.0)
    departures = [line.depart(0.0, 1_000_000) for _ in range(5)]
    assert departures == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_a_new_rate_holds_from_the_next_chunk():
    line = Line(8.0)
    assert line.depart(0.0, 1_000_000) == 1.0
    line.rate_mbit_s = 16.0
    assert line.depart(0.5, 1_000_000) == 1.5
    line.rate_mbit_s = None
    assert line.depart(0.5, 1_000_000) == 1.5
    assert line.depart(3.0, 1_000_000) == 3.0


@pytest.mark.parametrize(
    ("rate_mbit_s", "chunk_bytes"), [(0.01, 1448), (1, 1448), (20, 5000), (200, 16384), (None, 16384)]
)
def test_turns_are_short(rate_mbit_s, chunk_bytes):
    assert Line(rate_mbit_s).chunk_bytes == chunk_bytes


@pytest.mark.parametrize("rate_mbit_s", [0, -1, 1e-9, 1e9, float("nan"), float("inf")])
def test_rates_no_link_has_are_refused(rate_mbit_s):
    with pytest.raises(UsageError, match="Mbit/s"):
        Line(rate_mbit_s)
    with pytest.raises(UsageError, match="Mbit/s"):
        SlowLink(rate_mbit_s)


@pytest.mark.parametrize("delay_s", [-0.1, 61, float("nan")])
def test_delays_no_link_has_are_refused(delay_s):
    with pytest.raises(UsageError, match="delay"):
        SlowLink(1.0, delay_s)


def run_dry(way):
    """Let time jump from one thing to do to the next; return all arrivals."""
    arrived = []
    while (next_s := way.next_s()) < float("inf"):
        arrived += way.advance(next_s)
    return arrived


def test_lanes_take_turns():
    way, lanes = Direction(8.0, 0.0), [Lane(), Lane(), Lane()]
    chunk = way.line.chunk_bytes
    for lane, chunks in zip(lanes, (5, 2, 3), strict=True):
        way.offer(lane, bytes(chunks * chunk), 0.0)
    order = [lanes.index(lane) for _, lane, _ in run_dry(way)]
    assert order == [0, 1, 2, 0, 1, 2, 0, 2, 0, 0]
    assert way.crossed_bytes == 10 * chunk


def test_a_small_message_overtakes_a_long_one_on_another_lane():
    way, bulk, small = Direction(8.0, 0.5), Lane(), Lane()
    chunk = way.line.chunk_bytes
    way.offer(bulk, bytes(100 * chunk), 0.0)
    way.advance(0.0)
    way.offer(small, bytes(100), 0.0)
    arrivals = run_dry(way)
    (arrived_s,) = (arrived_s for arrived_s, lane, _ in arrivals if lane is small)
    # After the chunk that was on the line, and one turn of the lane that was there before.
    assert arrived_s == pytest.approx((2 * chunk + 100) * 1e-6 + 0.5, rel=1e-12)
    assert max(arrived_s for arrived_s, _, _ in arrivals) == pytest.approx(
        (100 * chunk + 100) * 1e-6 + 0.5, rel=1e-9
    )


def test_delay_does_not_lower_throughput():
    """A sender that fills whatever room there is keeps a long, fast line busy all the time."""
    way, lane = Direction(80.0, 0.2), Lane()
    total = sent = 8_000_000  # 0.8 s of line, four times what fits in flight
    way.offer(lane, bytes(way.room(lane)), 0.0)
    sent -= lane.held_bytes
    last_s, most_bytes = 0.0, 0
    while (now_s := way.next_s()) < float("inf"):
        for arrived_s, _, chunk in way.advance(now_s):
            last_s = arrived_s
            lane.held_bytes -= len(chunk)
            size = min(way.room(lane), sent)
            if size:
                way.offer(lane, bytes(size), arrived_s)
                sent -= size
        most_bytes = max(most_bytes, lane.held_bytes)
    assert way.crossed_bytes == total
    assert last_s == pytest.approx(total * 8 / 80e6 + 0.2, rel=1e-9)
    assert most_bytes <= way.most_bytes == QUEUE_BYTES + 2_000_000


def test_bytes_keep_their_order_and_nothing_arrives_early():
    rng = random.Random(0)
    way, lanes = Direction(3.0, 0.01), [Lane() for _ in range(4)]
    offered = dict.fromkeys(lanes, b"")
    got = dict.fromkeys(lanes, b"")
    last_s = now_s = 0.0
    for _ in range(300):
        now_s += rng.random() * 0.02
        lane = rng.choice(lanes)
        data = rng.randbytes(rng.randrange(1, 9000))
        offered[lane] += data
        way.offer(lane, data, now_s)
        for arrived_s, arrived_lane, chunk in way.advance(now_s):
            assert last_s <= arrived_s <= now_s
            last_s = arrived_s
            got[arrived_lane] += chunk
    for _, lane, chunk in run_dry(way):
        got[lane] += chunk
    assert got == offered


def test_a_dropped_lane_leaves_the_line_to_the_others():
    way, gone, stays = Direction(8.0, 1.0), Lane(), Lane()
    way.offer(gone, bytes(50_000), 0.0)
    way.offer(stays, bytes(20_000), 0.0)
    way.advance(0.001)
    way.drop(gone)
    way.drop(gone)
    arrivals = run_dry(way)
    assert {lane for _, lane, _ in arrivals} == {stays}
    assert sum(len(chunk) for _, _, chunk in arrivals) == 20_000


def test_room_is_none_or_a_whole_turn():
    way, lane = Direction(200.0, 0.0), Lane()
    assert way.room(lane) == QUEUE_BYTES
    way.offer(lane, bytes(QUEUE_BYTES - way.line.chunk_bytes), 0.0)
    assert way.room(lane) == way.line.chunk_bytes
    way.offer(lane, b"x", 0.0)
    assert way.room(lane) == 0


@contextlib.contextmanager
def listening():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(DEADLINE_S)
        yield listener, f"tcp://127.0.0.1:{listener.getsockname()[1]}"


def dial(address):
    host, port = address.removeprefix("tcp://").split(":")
    return socket.create_connection((host, int(port)), DEADLINE_S)


@contextlib.contextmanager
def connected(link, way="toward_right"):
    """A client and the server's end of one connection through the link."""
    with listening() as (listener, address), dial(getattr(link, way)(address)) as client:
        server = listener.accept()[0]
        server.settimeout(DEADLINE_S)
        with server:
            yield client, server


def read_all(end):
    return b"".join(iter(lambda: end.recv(1 << 16), b""))


def run_all(*calls):
    """Run calls in threads; return their results, raise what one raised."""
    results = [None] * len(calls)

    def run(index, call):
        try:
            results[index] = call()
        except BaseException as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=entry, daemon=True) for entry in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def send_in_pieces(end, data, seed):
    rng = random.Random(seed)
    start = 0
    while start < len(data):
        size = rng.choice([1, 7, 1000, 30_000, 200_000])
        end.sendall(data[start : start + size])
        start += size
    end.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize(("rate_mbit_s", "delay_s"), [(None, 0.0), (None, 0.01), (150.0, 0.0), (150.0, 0.02)])
def test_bytes_cross_unchanged_both_ways_on_many_connections(rate_mbit_s, delay_s):
    rng = random.Random(1)
    with SlowLink(rate_mbit_s, delay_s) as link, contextlib.ExitStack() as stack:
        calls, want, crossed = [], [], {"toward_right": [0, 0], "toward_left": [0, 0]}
        for index, way in enumerate(["toward_right", "toward_left", "toward_right", "toward_left"]):
            client, server = stack.enter_context(connected(link, way))
            forth, back = rng.randbytes(rng.randrange(600_000)), rng.randbytes(rng.randrange(300_000))
            calls += [
                lambda end=client, data=forth, seed=index: send_in_pieces(end, data, seed),
                lambda end=server, data=back, seed=-index: send_in_pieces(end, data, seed),
                lambda end=server: read_all(end),
                lambda end=client: read_all(end),
            ]
            want += [None, None, forth, back]
            crossed[way][0] += len(forth)
            crossed[way][1] += len(back)
        assert run_all(*calls) == want
        assert link.bytes_to_right == crossed["toward_right"][0] + crossed["toward_left"][1]
        assert link.bytes_to_left == crossed["toward_left"][0] + crossed["toward_right"][1]


def test_one_listener_takes_several_connections():
    with SlowLink(None) as link, listening() as (listener, address):
        front = link.toward_right(address)
        for number in range(3):
            with dial(front) as client, listener.accept()[0] as server:
                client.sendall(b"%d" % number)
                assert server.recv(1) == b"%d" % number
        assert (link.bytes_to_right, link.bytes_to_left) == (3, 0)


@pytest.mark.parametrize("delay_s", [0.0, 0.02])
def test_half_close_lets_the_other_way_go_on(delay_s):
    with SlowLink(None, delay_s) as link, connected(link) as (client, server):
        client.sendall(b"question")
        client.shutdown(socket.SHUT_WR)
        assert read_all(server) == b"question"
        server.sendall(b"answer")
        server.sendall(b", and more")
        server.close()
        assert read_all(client) == b"answer, and more"


def test_a_closed_server_is_noticed_by_a_client_that_only_reads():
    with SlowLink(50.0, 0.01) as link, connected(link) as (client, server):
        server.close()
        assert client.recv(1) == b""


def test_a_reset_ends_both_sides():
    with SlowLink(None) as link, connected(link) as (client, server):
        client.sendall(b"x")
        assert server.recv(1) == b"x"
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        client.close()
        with pytest.raises(ConnectionResetError):
            server.recv(1)


def test_a_listener_that_is_not_there_resets_the_client():
    with listening() as (_, address):
        pass
    with SlowLink(None) as link:
        # The reset may come before the client knows that it was connected.
        with pytest.raises(ConnectionResetError), dial(link.toward_right(address)) as client:
            client.recv(1)
        # The relay is not hurt by it.
        with connected(link) as (other, server):
            other.sendall(b"x")
            assert server.recv(1) == b"x"


@pytest.mark.parametrize("rate_mbit_s", [None, 1.0])
def test_a_sender_is_held_back_and_nothing_is_lost(rate_mbit_s):
    """Unlimited, only the reader that does not read holds the sender back; on a slow link, the line does."""
    total = 64 << 20
    with SlowLink(rate_mbit_s) as link, connected(link) as (client, server):
        if rate_mbit_s is None:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
        data = random.Random(2).randbytes(1 << 20)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 << 10)
        client.settimeout(0.3)
        sent = 0
        with contextlib.suppress(TimeoutError):
            while sent < total:
                sent += client.send(memoryview(data)[sent % len(data) :])
        # The kernel's buffers of four sockets and the relay's queue; far from all of it.
        assert 0 < sent < total // 8
        client.shutdown(socket.SHUT_WR)
        got = read_all(server)
        assert len(got) == sent
        assert got == bytes(itertools.islice(itertools.cycle(data), sent))
        assert link.bytes_to_right == sent


def test_close_ends_connections_listeners_and_the_thread():
    before = threading.active_count()
    link = SlowLink(0.1, 0.5)
    with listening() as (listener, address):
        front = link.toward_right(address)
        with dial(front) as client, listener.accept()[0] as server:
            client.sendall(bytes(20_000))
            link.close()
            link.close()
            server.settimeout(DEADLINE_S)
            for end in (client, server):
                with contextlib.suppress(ConnectionResetError):
                    while end.recv(1 << 16):
                        pass
        with pytest.raises(ConnectionRefusedError):
            dial(front)
        with pytest.raises(LinkError, match="closed"):
            link.toward_right(address)
    assert threading.active_count() == before


@pytest.mark.parametrize(
    "address",
    [
        "",
        "127.0.0.1:80",
        "tcp://localhost:80",
        "tcp://127.0.0.1",
        "tcp://127.0.0.1:0",
        "tcp://127.0.0.1:70000",
    ],
)
def test_addresses_that_are_none_are_refused(address):
    with SlowLink(None) as link, pytest.raises(UsageError, match="no address"):
        link.toward_left(address)
