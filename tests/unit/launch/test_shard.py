"""A shard in a process of its own listens, and ends with whoever started it."""

import subprocess
from pathlib import Path

import pytest

from shoestring.errors import JoinError
from shoestring.launch.lifeline import Lifeline
from shoestring.launch.shard import ShardOrder, ShardProcess, local_address


@pytest.mark.parametrize("linger", [False, True])
def test_a_shard_ends_when_its_lifeline_does(tmp_path, linger):
    lifeline = Lifeline()
    tmp_path.chmod(0o700)
    order = ShardOrder(0, 1, "test", local_address(tmp_path, 0), linger=linger)
    shard = ShardProcess(order, lifeline)
    try:
        assert shard.wait_ready() == order.address
        lifeline.close()
        assert shard.process.wait(30.0) == 0
    finally:
        shard.process.kill()
        shard.process.wait()


def test_a_shard_that_may_not_listen_is_an_error(capfd):
    lifeline = Lifeline()
    shard = ShardProcess(ShardOrder(1, 2, "test", "tcp://0.0.0.0:0"), lifeline)
    with pytest.raises(JoinError, match="shard 1 ended with exit code 1 before it listened"):
        shard.wait_ready()
    lifeline.close()
    assert "without keys" in capfd.readouterr().err


def test_a_shard_that_does_not_get_ready_is_ended():
    lifeline = Lifeline()
    shard = ShardProcess(ShardOrder(0, 1, "test", "tcp://127.0.0.1:0"), lifeline, stderr=subprocess.DEVNULL)
    with pytest.raises(JoinError, match="exit code -9"):
        shard.wait_ready(timeout_s=0.0)
    lifeline.close()


def test_a_long_path_falls_back_to_loopback():
    assert local_address(Path("/tmp/run"), 1) == "ipc:///tmp/run/shard-1"
    assert local_address(Path("/tmp") / ("x" * 90), 1) == "tcp://127.0.0.1:0"
