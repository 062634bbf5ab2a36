"""The switch's process, with sockets in place of network cards: no root is needed for those."""

import contextlib
import os
import socket
import subprocess
import sys
import time

import psutil
import pytest

from shoestring.bench.link import tunnel
from shoestring.errors import ShoestringError

DEADLINE_S = 60.0
ADDRESSES = ("10.91.0.1", "10.91.0.2", "10.91.0.3")


def packet(target, payload):
    return b"\x45" + bytes(15) + socket.inet_aton(target) + payload


@contextlib.contextmanager
def joined(rate_mbit_s, delay_s):
    """Give the hosts' ends of three cards, and the id of the process that joins them."""
    with contextlib.ExitStack() as stack:
        ends, cards = [], {}
        for address in ADDRESSES:
            near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
            ends.append(stack.enter_context(near))
            near.settimeout(DEADLINE_S)
            far.setblocking(False)
            cards[address] = stack.enter_context(far).fileno()
        yield ends, stack.enter_context(tunnel.running(cards, rate_mbit_s, delay_s))


def test_packets_arrive_whole_at_the_host_they_are_for_and_not_early():
    with joined(100.0, 0.01) as (ends, _):
        for target in (1, 2):
            data = packet(ADDRESSES[target], os.urandom(12_000))
            begun_s = time.monotonic()
            ends[0].send(data)
            assert ends[target].recv(1 << 16) == data
            assert time.monotonic() - begun_s >= 0.01 + len(data) * 8 / 100e6


def test_packets_for_nobody_are_lost_and_disturb_nothing():
    with joined(100.0, 0.0) as (ends, _):
        wanted = packet(ADDRESSES[0], b"wanted")
        for data in (b"\x00", b"\x60" + bytes(47), packet("10.91.0.9", b""), packet("255.255.255.255", b"")):
            ends[1].send(data)
        ends[1].send(wanted)
        assert ends[0].recv(1 << 16) == wanted
        ends[2].send(wanted)
        assert ends[0].recv(1 << 16) == wanted


def test_process_is_gone_afterwards_also_after_a_failure():
    pids = []

    def fail():
        with joined(10.0, 0.0) as (_, pid):
            pids.append(pid)
            assert psutil.pid_exists(pid)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not psutil.pid_exists(pids[0])


def test_process_ends_with_the_one_that_started_it():
    """Also with one that is killed and can tidy nothing."""
    program = (
        "import os, socket, sys\n"
        "from shoestring.bench.link import tunnel\n"
        "near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
        "with tunnel.running({'10.91.0.1': far.fileno()}, 10.0, 0.0) as pid:\n"
        "    print(pid, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        process = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    process.wait(DEADLINE_S)


def test_process_that_fails_says_why():
    with socket.socket() as nothing:  # not connected: reading it is an error
        nothing.setblocking(False)
        with (
            pytest.raises(ShoestringError, match="the switch between the hosts failed: .*onnect"),
            tunnel.running({"10.91.0.1": nothing.fileno()}, 10.0, 0.0) as pid,
        ):
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # it has ended, and is ours to ask why


def test_impossible_rates_are_said_before_anything_runs():
    with (
        pytest.raises(ShoestringError, match="a rate of 0.0 Mbit/s"),
        tunnel.running({"10.91.0.1": sys.stdout.fileno()}, 0.0, 0.0),
    ):
        pytest.fail("it runs")


def test_a_device_that_cannot_be_opened_is_named(monkeypatch, tmp_path):
    folder = tmp_path / "net" / "tun"
    folder.mkdir(parents=True)  # a folder in its place
    monkeypatch.setattr(tunnel, "_DEVICE", folder)
    with pytest.raises(ShoestringError, match=r"`.*/net/tun` cannot be opened: ") as found:
        tunnel.open_device("shoe0")
    assert "root" in found.value.hint
