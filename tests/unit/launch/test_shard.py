"""A shard is told all it needs on its command line, and says where it listens."""

from pathlib import Path

import pytest

from shoestring.config import Run, settings
from shoestring.errors import JoinError
from shoestring.launch.shard import ShardArguments, local_address
from shoestring.launch.supervisor import Supervisor

LATER_S = 300.0


@pytest.fixture
def supervisor():
    made = Supervisor()
    yield made
    made.stop(0.0)


@pytest.mark.parametrize("linger", [False, True])
def test_a_shard_ends_when_its_lifeline_does(supervisor, tmp_path, linger):
    tmp_path.chmod(0o700)
    arguments = ShardArguments(0, 1, Run("test"), local_address(tmp_path, 0), linger=linger)
    shard = supervisor.start_shard(arguments)
    assert shard.wait_ready(LATER_S) == arguments.address
    supervisor.let_go()
    assert shard.ended.wait(30.0)
    assert shard.code == 0


def test_a_shard_that_may_not_listen_is_an_error(supervisor, capfd):
    shard = supervisor.start_shard(ShardArguments(1, 2, Run("test"), "tcp://0.0.0.0:0"))
    with pytest.raises(JoinError, match="shard 1 ended with exit code 1 before it listened"):
        shard.wait_ready(LATER_S)
    assert "without keys" in capfd.readouterr().err


def test_a_shard_that_does_not_get_ready_is_ended(supervisor):
    shard = supervisor.start_shard(ShardArguments(0, 1, Run("test"), "tcp://127.0.0.1:0"))
    with pytest.raises(JoinError, match="exit code -9"):
        shard.wait_ready(0.0)


def test_a_shard_is_told_every_setting_that_is_its_own():
    run = Run(
        "test", folder=Path("/f"), keys=Path("/k"), checkpoint=Path("/c"), resume=Path("/r"), lease_s=7.0
    )
    words = ShardArguments(0, 2, run, "tcp://127.0.0.1:0", threads=3).command(5)
    told = dict(zip(words[4:-1:2], words[5:-1:2], strict=True))
    assert told == {
        "--address": "tcp://127.0.0.1:0",
        "--shard": "0",
        "--shards": "2",
        "--run": "test",
        "--threads": "3",
        "--lifeline": "5",
        **{one.option: one.text(getattr(run, one.name)) for one in settings(Run) if one.about.is_for_shards},
    }
    assert (told["--resume"], told["--lease-s"], told["--save-timeout-s"]) == ("/r", "7", "60")


def test_a_long_path_falls_back_to_loopback():
    assert local_address(Path("/tmp/run"), 1) == "ipc:///tmp/run/shard-1"
    assert local_address(Path("/tmp") / ("x" * 90), 1) == "tcp://127.0.0.1:0"
