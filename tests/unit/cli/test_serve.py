"""`shoestring serve`: says where it listens, and ends when it should."""

import json
import signal
import socket

import pytest
import zmq

from shoestring.wire import frames
from shoestring.wire import messages as say
from shoestring.wire.link import connect
from tests.unit.launch.processes import Command, run_command


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_stops_it(tmp_path, number, code):
    with Command("serve", "--run", "test", "--json", "--folder", tmp_path) as command:
        facts = json.loads(command.read_line())
        assert facts | {"address": "", "pid": 0} == {
            "address": "",
            "pid": 0,
            "run": "test",
            "shard": 0,
            "shards": 1,
        }
        assert facts["pid"] == command.process.pid
        assert facts["address"].startswith("tcp://127.0.0.1:")
        assert command.finish(number) == (code, "", "")


def test_it_answers_and_says_for_whom_it_is():
    with Command("serve", "--run", "test", "--shards", "2", "--shard", "1") as command:
        address = command.read_line()
        with (
            zmq.Context() as context,
            connect(context, address, keys=None, identity=b"0.1", max_message_bytes=1 << 20) as dealer,
        ):
            hello = say.Hello(
                protocol=say.PROTOCOL, run="other", worker=0, workers=1, life="1", shard=1, shards=2
            )
            dealer.send_multipart(frames.encode(hello))
            assert dealer.poll(30_000)
            refusal, _ = frames.decode(dealer.recv_multipart())
        assert isinstance(refusal, say.Refusal)
        assert "this is shard 1 of 2 of run `test`" in refusal.message
        code, _, err = command.finish(signal.SIGTERM)
        assert (code, err) == (0, "shard 1 of 2 of run `test` is ready; Ctrl-C stops it\n")


def test_a_port_that_is_taken_is_an_error():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, out, err = run_command("serve", "--run", "test", "--address", f"tcp://127.0.0.1:{port}")
    assert (code, out) == (1, "")
    assert err.startswith(
        f"error: cannot listen on `tcp://127.0.0.1:{port}`: Address already in use\n\nhint: "
    )


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (("--address", "tcp://0.0.0.0:0"), 1, "without keys"),
        (("--shard", "2", "--shards", "2"), 2, "there is no shard 2 of 2"),
        (("--keys", "nowhere"), 2, "nowhere"),
        (("--resume", "auto"), 2, "a shard does not choose a checkpoint"),
        (("--lease-s", "0"), 2, "'--lease-s'"),
        (("--resume", "nowhere"), 1, "there is no folder `nowhere`"),
    ],
)
def test_what_cannot_be_served_is_an_error(args, code, message):
    found, out, err = run_command("serve", "--run", "test", *args)
    assert (found, out) == (code, "")
    assert err.startswith("error: ")
    assert message in err.splitlines()[0]
