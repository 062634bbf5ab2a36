"""What Slurm tells a task, and its lists of hosts."""

import socket
import subprocess
import sys
import threading

import pytest

from shoestring.errors import UsageError
from shoestring.launch import slurm
from shoestring.launch.rendezvous import HOST_VARIABLE, Place
from shoestring.wire import keys
from tests.unit.launch.processes import LIMIT_S, clean_environment

TASK = {
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "2",
    "SLURM_JOB_NODELIST": "gpu[07-08],old1",
    "SLURM_NNODES": "3",
    "SLURM_NTASKS": "6",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "PATH": "",
}


@pytest.mark.parametrize(
    ("nodes", "names"),
    [
        ("a", ["a"]),
        ("a,b2", ["a", "b2"]),
        ("a[1-3,7],b2", ["a1", "a2", "a3", "a7", "b2"]),
        ("gpu[08-11]", ["gpu08", "gpu09", "gpu10", "gpu11"]),
        ("r[1-2]n[1,3].lan", ["r1n1.lan", "r1n3.lan", "r2n1.lan", "r2n3.lan"]),
    ],
)
def test_expand(nodes, names):
    assert slurm.expand(nodes) == names


@pytest.mark.parametrize(
    "nodes", ["", ",", "a,,b", "a[", "a]", "a[]", "a[1-]", "a[x]", "a[[1]]", "a[0-999999]"]
)
def test_expand_refuses_what_is_no_list(nodes):
    with pytest.raises(UsageError, match="no list of hosts"):
        slurm.expand(nodes)


def test_place(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert slurm.place(TASK) == Place(
        name="slurm-1234.2",
        worker=3,
        workers=6,
        local=1,
        host=1,
        hosts=3,
        store_host="gpu07",
        store_port=20000 + 7 * 1234 + 2,
        hosts_store=False,
    )
    assert slurm.place(TASK | {"SLURM_PROCID": "0"}).hosts_store
    assert slurm.place(TASK | {"SLURM_RESTART_COUNT": "2"}).attempt == 2
    assert slurm.place(TASK | {"SLURM_NNODES": "1"}).store_host == "127.0.0.1"


@pytest.mark.parametrize("change", [{"SLURM_NODEID": ""}, {"SLURM_NTASKS": "many"}])
def test_a_broken_environment_is_an_error(monkeypatch, change):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UsageError, match="looks like Slurm's"):
        slurm.place(TASK | change)


# A socket can be written to once the shard has let its key in.
MEET = """
import sys
import zmq
import shoestring
from shoestring.worker import session

run = shoestring.init()
for address, dealer in session.current().connect():
    print(run.worker, run.name, address, bool(dealer.poll(30_000, zmq.POLLOUT)), flush=True)
    dealer.close()
sys.stdin.read()  # a shard ends with its worker: not before the other has seen it
"""


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def test_tasks_on_two_nodes_meet_and_are_let_in_by_their_keys(tmp_path):
    for name in ("shard", "worker-0", "worker-1"):
        keys.new(name, tmp_path)
    task = TASK | {"SLURM_JOB_NODELIST": "127.0.0.[1-2]", "SLURM_NNODES": "2", "SLURM_NTASKS": "2"}
    task |= {"SLURM_LOCALID": "0", "SHOESTRING_KEYS": str(tmp_path), HOST_VARIABLE: "127.0.0.1"}
    step = next(
        step for step in range(1000) if is_free(slurm.place(task | {"SLURM_STEP_ID": str(step)}).store_port)
    )
    tasks = [
        subprocess.Popen(
            [sys.executable, "-c", MEET],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=clean_environment()
            | task
            | {"SLURM_STEP_ID": str(step), "SLURM_PROCID": id_, "SLURM_NODEID": id_},
        )
        for id_ in ("0", "1")
    ]
    overdue = threading.Timer(LIMIT_S, lambda: [process.kill() for process in tasks])
    overdue.start()
    first, second = ([process.stdout.readline().split() for _ in range(2)] for process in tasks)
    errors = [process.communicate()[1] for process in tasks]
    overdue.cancel()
    assert [process.returncode for process in tasks] == [0, 0], errors
    assert [line[2] for line in first] == [line[2] for line in second]
    for worker, lines in enumerate((first, second)):
        assert [[line[0], line[1], line[3]] for line in lines] == [
            [str(worker), f"slurm-1234.{step}", "True"]
        ] * 2
