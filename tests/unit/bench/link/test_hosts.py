"""What hosts are told of their link, why one cannot be had, and that nothing is left behind."""

import secrets
import subprocess
from pathlib import Path

import pytest

from shoestring.bench.link import hosts, tunnel
from shoestring.errors import ShoestringError, UsageError


@pytest.fixture
def listed(monkeypatch):
    """List what this machine has of the test's namespaces and network cards, by a name of their own."""
    can_list, token = not hosts.missing("loopback", own_space=True), secrets.token_hex(5)
    monkeypatch.setattr(hosts.secrets, "token_hex", lambda size: token)

    def look():
        said = ""
        for what in (["netns"], ["-br", "link"]) if can_list else ():
            said += subprocess.run(["ip", *what], capture_output=True, text=True, check=True).stdout
        return {word for word in said.split() if token in word and word.startswith("shoe")}

    return look


@pytest.mark.parametrize("link", [*hosts.LINKS, *hosts.DELAYED_LINKS])
def test_links_say_what_they_are(link):
    made = hosts.Hosts(link, ("here", "there"))
    rate, _, delay = link.partition("-")
    rates = {"loopback": None, "1gbit": 10**9, "100mbit": 10**8, "10mbit": 10**7}
    assert made.rate_bits_s == rates[rate]
    assert made.round_trip_s == float(delay.removesuffix("ms") or 0) / 1e3
    assert made.card == ("lo" if link == "loopback" else "cable")
    assert made.command(1, "echo", "hello") == ["ip", "netns", "exec", "there", "echo", "hello"]
    assert made.address(1, 1) == "127.0.0.1"
    assert made.address(1, 0) == ("127.0.0.1" if link == "loopback" else "10.91.0.2")


def test_loopback_is_this_machine():
    with hosts.connected("loopback", 5) as made:
        assert (made.spaces, made.count) == ((), 5)
        assert made.command(4, "echo", "hello") == ["echo", "hello"]
        assert made.sent_bytes(0) <= made.received_bytes(4)  # the same bytes, asked for later


@pytest.mark.parametrize(
    ("link", "count", "problem"),
    [
        ("2gbit", 2, "there is no link `2gbit`"),
        ("loopback", 0, "0 hosts"),
        ("10mbit-40ms", 9, "9 hosts"),
        ("1gbit", 3, "`1gbit` joins two hosts, not 3"),
    ],
)
def test_hosts_that_cannot_be_are_refused(link, count, problem):
    with pytest.raises(UsageError, match=problem), hosts.connected(link, count):
        pytest.fail("they are there")


@pytest.mark.parametrize("link", [*hosts.LINKS[1:], *hosts.DELAYED_LINKS])
def test_links_that_cannot_be_had_say_why(monkeypatch, link):
    monkeypatch.setattr(hosts.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(hosts.shutil, "which", lambda tool: f"/usr/sbin/{tool}")
    assert hosts.missing(link) == "network namespaces need root"
    assert hosts.missing("loopback", own_space=True) == "network namespaces need root"
    monkeypatch.setattr(hosts.shutil, "which", lambda tool: None)
    assert hosts.missing(link) == "`ip` is not installed"
    assert hosts.missing("loopback") == ""


def test_a_link_without_its_device_says_so_and_leaves_nothing(monkeypatch, listed):
    def refuse(name):
        raise ShoestringError("`/dev/net/tun` cannot be opened: not permitted", hint="another link")

    monkeypatch.setattr(tunnel, "open_device", refuse)
    expected = hosts.missing("loopback", own_space=True) or "`/dev/net/tun` cannot be opened: not permitted"
    assert hosts.missing("10mbit-40ms") == expected
    assert listed() == set()


def test_a_machine_without_the_device_file_gets_one_for_the_moment(monkeypatch):
    """With root the link can be had all the same, and `/dev` is as before."""
    usual = hosts.missing("10mbit-40ms")
    monkeypatch.setattr(tunnel, "_DEVICE", Path("/dev/net/absent"))
    assert hosts.missing("10mbit-40ms").replace("absent", "tun") == usual
    assert list(Path("/dev").glob("shoestring-*")) == []


@pytest.mark.parametrize(
    "link", [link for link in (*hosts.LINKS, *hosts.DELAYED_LINKS) if not hosts.missing(link)]
)
def test_nothing_is_left_after_a_failure(link, listed):
    own_space, during = not hosts.missing("loopback", own_space=True), []

    def fail():
        with hosts.connected(link, own_space=own_space) as made:
            during.extend(made.spaces)
            assert set(during) <= listed()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert listed() == set()
    # One namespace a host; those of a loopback share one, and without root have none.
    assert len(set(during)) == (int(own_space) if link == "loopback" else 2)
