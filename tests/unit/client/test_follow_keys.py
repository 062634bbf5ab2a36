"""Whose key may only follow can read a run and do nothing else."""

import contextlib
import threading

import pytest
import zmq

from shoestring.client.follow import follow
from shoestring.errors import KeyFileError, OverdueError
from shoestring.server.serve import Service, listen
from shoestring.server.shard import Shard
from shoestring.wire import frames, keys
from shoestring.wire import messages as say
from shoestring.wire.link import connect
from tests.unit.server.talk import PARTS, Talk, gradient

WAIT_MS = 20_000


@pytest.fixture
def folder(tmp_path):
    """A folder of keys, as on a host that has all of them."""
    for name in ("shard", "worker-0", "follower", "follower-eval", "followers"):
        keys.new(name, tmp_path / "keys")
    return tmp_path / "keys"


@pytest.fixture
def serve(folder):
    """Serve a shard whose model is there, on loopback, with keys; return its address."""
    with contextlib.ExitStack() as opened:

        def begin(shard: Shard | None = None) -> str:
            context = opened.enter_context(zmq.Context())
            listener = listen(context, "tcp://127.0.0.1:0", keys=keys.keys_from_folder(folder, "shard"))
            opened.callback(listener.close)
            service = Service(shard or model_of_one_worker(), listener)
            thread = threading.Thread(target=service.run, daemon=True)
            thread.start()
            opened.callback(thread.join)
            opened.callback(service.stop)
            return listener.address

        yield begin


def model_of_one_worker() -> Shard:
    talk = Talk(workers=1)
    talk.enter(0)
    for part in PARTS:
        talk.tell(0, say.Init(part.index), gradient(part.index, 0, 0).view("u1").data)
    return talk.shard


def test_keys_are_told_apart_by_their_names(folder):
    found = keys.keys_from_folder(folder, "shard")
    public = keys.load_named(folder)
    assert found.followers == {public["follower"], public["follower-eval"]}
    assert found.allowed == {key for name, key in public.items() if name != "shard"}


@pytest.mark.parametrize("name", ["follower-eval", "worker-0"])
def test_any_key_that_is_allowed_may_follow(serve, folder, name):
    with follow(serve(), key=folder / f"{name}.secret") as follower:
        assert follower.pull(timeout_s=20).round == 0


def test_the_key_is_found_where_the_environment_says(serve, folder, monkeypatch):
    monkeypatch.setenv("SHOESTRING_KEYS", str(folder))
    with follow(serve()) as follower:
        assert follower.pull(timeout_s=20).round == 0


def test_a_program_without_a_key_is_not_let_in(serve, folder):
    (folder / "follower.public").unlink()
    address = serve()
    for key in (None, folder / "follower.secret"):
        with follow(address, key=key) as follower, pytest.raises(OverdueError, match="answer of shard 0"):
            follower.pull(timeout_s=0.3)
    with pytest.raises(KeyFileError):
        follow(address, key=folder / "nobody.secret")


@pytest.mark.parametrize("name", ["follower-eval", "followers"])
def test_a_key_that_may_only_follow_says_nothing_else(serve, folder, name):
    hello = say.Hello(
        protocol=say.PROTOCOL, run="run", worker=0, workers=1, life="9", incarnation=9, shard=0, shards=1
    )
    others = [
        hello,
        say.Enter(5),
        say.Pull(0, 0),
        say.Init(0),
        say.Put(0, 1, ()),
        say.Saved(1),
        say.Ask(0, 1, 0),
    ]
    talk = Talk(workers=1)
    with zmq.Context() as context:
        own = keys.keys_from_folder(folder, "worker", name)
        dealer = connect(
            context, serve(), keys=own, identity=b"0.9.0", max_message_bytes=frames.PAYLOAD_LIMIT
        )
        assert dealer.poll(WAIT_MS, zmq.POLLOUT)
        for message in others:
            dealer.send_multipart(frames.encode(message, talk.packed))
            assert dealer.poll(WAIT_MS)
            answer, _ = frames.decode(dealer.recv_multipart())
            if name == "followers":  # a name like another is another
                assert isinstance(answer, say.Welcome)
                break
            assert isinstance(answer, say.Refusal)
            assert answer.message == "this key may only follow the run"
        dealer.close(0)
