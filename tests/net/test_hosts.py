"""Real packets between three hosts: whole, counted, and never earlier than their link allows.

Without root, or without TUN devices, the hosts are this machine's loopback, of which the same
must hold with no rate and no delay.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys

import psutil

from shoestring.bench.link import hosts

LINK = "100mbit-10ms"
DEADLINE_S = 60
SIZE = 2_000_000
LISTEN = """
import hashlib, json, socket, sys
answering = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
answering.bind(("0.0.0.0", 0))
listener = socket.create_server(("0.0.0.0", 0))
for end in (answering, listener):
    end.settimeout(60)
print(json.dumps([answering.getsockname()[1], listener.getsockname()[1]]), flush=True)
for _ in range(int(sys.argv[1])):
    data, sender = answering.recvfrom(1 << 16)
    answering.sendto(data, sender)
ends = [listener.accept()[0] for _ in range(2)]
for end in ends:
    end.settimeout(60)
    digest = hashlib.sha256()
    while data := end.recv(1 << 16):
        digest.update(data)
    end.sendall(digest.hexdigest().encode())
    end.close()
"""
SEND = """
import hashlib, json, random, socket, sys, time
address, answering, listener, times, size, seed = sys.argv[1], *map(int, sys.argv[2:])
asking = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
asking.settimeout(60)
trips = []
for number in range(times):
    begun = time.monotonic()
    asking.sendto(b"%d" % number, (address, answering))
    assert asking.recv(100) == b"%d" % number
    trips.append(time.monotonic() - begun)
data = random.Random(seed).randbytes(size)
begun = time.monotonic()
end = socket.create_connection((address, listener), timeout=60)
end.sendall(data)
end.shutdown(socket.SHUT_WR)
said = end.makefile("rb").read().decode()
took = time.monotonic() - begun
print(json.dumps([trips, begun, took, said == hashlib.sha256(data).hexdigest()]))
"""


def link_to_test():
    return "loopback" if hosts.missing(LINK) else LINK


def run(made, host, program, *words, **options):
    command = made.command(host, sys.executable, "-c", program, *map(str, words))
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options)


def test_three_hosts_exchange_bytes_at_their_links_pace():
    times = 3
    with contextlib.ExitStack() as stack:
        made = stack.enter_context(hosts.connected(link_to_test(), 3))
        before = [made.sent_bytes(host) for host in range(3)], made.received_bytes(0)
        listening = stack.enter_context(run(made, 0, LISTEN, 2 * times))
        stack.callback(listening.kill)
        ports = json.loads(listening.stdout.readline())
        sending = []
        for host in (1, 2):
            words = (made.address(0, host), *ports, times, SIZE, host)
            sending.append(stack.enter_context(run(made, host, SEND, *words)))
            stack.callback(sending[-1].kill)
        found = [json.loads(process.communicate(timeout=DEADLINE_S)[0]) for process in sending]
        assert listening.wait(DEADLINE_S) == 0
        after = [made.sent_bytes(host) for host in range(3)], made.received_bytes(0)
        pace_s = 0.0 if made.rate_bits_s is None else SIZE * 8 / made.rate_bits_s
        # All of it arrived, and was counted where it left and where it came in.
        assert [is_whole for *_, is_whole in found] == [True, True]
        for host in (1, 2):
            assert after[0][host] - before[0][host] >= SIZE
        assert after[1] - before[1] >= 2 * SIZE
        # Nothing was faster than the link, nor were both together than the receiver's.
        for trips, _, took_s, _ in found:
            assert min(trips) >= made.round_trip_s
            assert took_s >= pace_s + 2 * made.round_trip_s  # to connect; to send and be answered
        ended_s = max(begun_s + took_s for _, begun_s, took_s, _ in found)
        assert ended_s - min(begun_s for _, begun_s, *_ in found) >= 2 * pace_s


def test_hosts_that_share_a_loopback_of_their_own_count_every_byte():
    """Datagrams on an otherwise silent loopback: their bytes and headers, no more and no less."""
    own_space = not hosts.missing("loopback", own_space=True)
    program = (
        "import socket\n"
        "here, there = (socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2))\n"
        "here.bind(('127.0.0.1', 0))\n"
        "for _ in range(5):\n"
        "    there.sendto(bytes(1000), here.getsockname())\n"
        "    assert here.recv(2000) == bytes(1000)\n"
    )
    with hosts.connected("loopback", 3, own_space=own_space) as made:
        before = made.sent_bytes(0), made.received_bytes(2)
        with run(made, 1, program) as process:
            assert process.wait(DEADLINE_S) == 0
        counted = made.sent_bytes(0) - before[0], made.received_bytes(2) - before[1]
    wanted = 5 * (1000 + 20 + 8)
    if own_space:
        assert counted == (wanted, wanted)
    else:
        assert min(counted) >= wanted


def test_ctrl_c_leaves_nothing():
    link = link_to_test()
    program = (
        "import signal, sys\n"
        "from shoestring.bench.link import hosts\n"
        "import psutil\n"
        # Ignored, where the tests themselves run in a shell's background.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"with hosts.connected({link!r}, 3) as made:\n"
        "    children = [child.pid for child in psutil.Process().children()]\n"
        "    print(*made.spaces, *children, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    with run(
        hosts.Hosts("loopback"), 0, program, stdin=subprocess.PIPE, stderr=subprocess.PIPE, process_group=0
    ) as parent:
        made = parent.stdout.readline().split()
        os.killpg(parent.pid, signal.SIGINT)  # as a terminal does: all of the group
        _, complaints = parent.communicate(timeout=DEADLINE_S)
    assert complaints.strip().endswith("KeyboardInterrupt")
    assert len(made) == (0 if link == "loopback" else 4)
    for space in made[:3]:
        listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
        assert space not in listed.stdout
    for pid in made[3:]:
        assert not psutil.pid_exists(int(pid))
