"""Where a run's shards listen: addresses, a run's folder, the environment."""

import pytest

from shoestring.client.address import Place, find
from shoestring.errors import UsageError
from shoestring.observe.events import EventLog


def listen(folder, shard: int, shards: int, run: str = "digits", port: int = 7000) -> None:
    with EventLog(folder, f"shard-{shard}") as log:
        log.write("listen", address=f"tcp://127.0.0.1:{port + shard}", shard=shard, shards=shards, run=run)


@pytest.mark.parametrize(
    ("given", "addresses"),
    [
        ("10.0.0.5:7000", ("tcp://10.0.0.5:7000",)),
        ("tcp://10.0.0.5:7000, node-2:7000", ("tcp://10.0.0.5:7000", "tcp://node-2:7000")),
        ("ipc:///run/a b/shard-0", ("ipc:///run/a b/shard-0",)),
        ("[fd00::5]:7000", ("tcp://[fd00::5]:7000",)),
    ],
)
def test_addresses_are_taken_as_they_are(given, addresses):
    assert find(given) == Place(addresses)


def test_a_folder_tells_where_its_last_run_listens(tmp_path):
    for shard in (1, 0):
        listen(tmp_path, shard, 2, "older", 6000)
    for shard in (1, 0):
        listen(tmp_path, shard, 2)
    assert find(tmp_path) == Place(("tcp://127.0.0.1:7000", "tcp://127.0.0.1:7001"), "digits")
    assert find(str(tmp_path)) == find(tmp_path)


def test_shards_of_an_earlier_run_are_not_mixed_in(tmp_path):
    for shard in range(3):
        listen(tmp_path, shard, 3, "older", 6000)
    listen(tmp_path, 0, 2)
    with pytest.raises(UsageError, match="1 of 2 shards say where they listen"):
        find(tmp_path)


def test_a_run_that_has_ended_says_so(tmp_path):
    listen(tmp_path, 0, 1)
    with EventLog(tmp_path, "shard-0") as log:
        log.write("end")
    with pytest.raises(UsageError, match="has ended"):
        find(tmp_path)


def test_what_is_neither_says_what_there_is(tmp_path, monkeypatch):
    with pytest.raises(UsageError, match="neither a run's folder nor the addresses of shards"):
        find(tmp_path / "nothing")
    with pytest.raises(UsageError, match="0 of 0 shards"):
        find(tmp_path)
    monkeypatch.delenv("SHOESTRING_SHARDS", raising=False)
    with pytest.raises(UsageError, match="`SHOESTRING_SHARDS` is not set"):
        find(None)
    monkeypatch.setenv("SHOESTRING_SHARDS", "tcp://10.0.0.5:7000,tcp://10.0.0.6:7000")
    assert find(None) == Place(("tcp://10.0.0.5:7000", "tcp://10.0.0.6:7000"))


@pytest.mark.parametrize(
    "wrong", [{"shards": "2"}, {"shards": 2.5}, {"shard": None}, {"address": 5}, {"shards": -1}]
)
def test_a_damaged_log_is_no_address(tmp_path, wrong):
    with EventLog(tmp_path, "shard-0") as log:
        log.write("listen", **({"address": "tcp://a:1", "shard": 0, "shards": 1, "run": "r"} | wrong))
    with pytest.raises(UsageError):
        find(tmp_path)
