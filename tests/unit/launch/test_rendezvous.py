"""Between hosts there are keys or nothing; a failure on one host reaches all workers."""

import socket
import tempfile
from dataclasses import replace

import psutil
import pytest

from shoestring.config import Run
from shoestring.errors import JoinError, UsageError
from shoestring.launch import rendezvous
from shoestring.launch.rendezvous import HOST_VARIABLE, Place, meet, own_address
from shoestring.worker import session
from tests.unit.launch.processes import wait_gone


@pytest.fixture
def place():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    yield Place("test", 0, 1, 0, 0, 1, "127.0.0.1", port, hosts_store=True)
    session.end()


def test_a_worker_alone_gets_a_shard_and_leaves_nothing_behind(place, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    run = meet(replace(place, attempt=2), Run(codec="int8"))
    assert run == Run(name="test", codec="int8", shards=run.shards, incarnation=3)
    assert len(run.shards) == 1
    shards = [child for child in psutil.Process().children() if "serve" in child.cmdline()]
    assert len(shards) == 1
    session.end()
    assert not wait_gone(shards, 0.0)
    assert not list(tmp_path.iterdir())
    with socket.socket() as free:  # the store is gone, too: another may use its port
        free.bind(("127.0.0.1", place.store_port))


def test_several_hosts_need_keys(place):
    with pytest.raises(UsageError, match="a run on 2 hosts needs keys"):
        meet(replace(place, workers=2, hosts=2), Run())


def test_a_shard_that_cannot_start_is_an_error_for_all(place, tmp_path, capfd):
    missing = tmp_path / "keys"
    with pytest.raises(JoinError, match="shard 0 ended with exit code 2 before it listened"):
        meet(replace(place, hosts=2, workers=2), Run(keys=missing))
    assert str(missing) in capfd.readouterr().err


def test_a_checkpoint_that_is_not_there_is_an_error_for_all(place, tmp_path):
    with pytest.raises(JoinError, match="there is no folder"):
        meet(place, Run(resume=tmp_path / "nothing"))


def test_others_that_do_not_come_are_an_error(place):
    with pytest.raises(JoinError, match="could not meet the others"):
        meet(replace(place, worker=1, workers=2, local=1, hosts_store=True), Run(meet_timeout_s=0.5))


def test_own_address_can_be_given(monkeypatch):
    monkeypatch.setenv(HOST_VARIABLE, "10.1.2.3")
    assert own_address("127.0.0.1") == "10.1.2.3"


def test_own_address_is_never_one_that_others_cannot_reach(monkeypatch):
    monkeypatch.delenv(HOST_VARIABLE, raising=False)
    monkeypatch.setattr(rendezvous, "_OUTWARDS", ("127.0.0.1", "::1"))
    with pytest.raises(UsageError, match="no address that others reach it by"):
        own_address("localhost")
