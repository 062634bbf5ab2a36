"""Which clusters are used, which are refused, and how much of one a run asks for."""

from pathlib import Path

import pytest

from shoestring.errors import UsageError
from shoestring.launch.ray import cluster as raycluster
from shoestring.launch.ray.cluster import Node, core_share, parse_address, probe, refuse_open
from tests.unit.launch.processes import run_command, wait_gone
from tests.unit.launch.ray.rays import ENVIRONMENT, RayCommand, processes_of, ray_nodes, short_folder

TOKEN = "0123456789abcdef" * 2


def nodes(*cpus: float) -> list[Node]:
    return [Node(str(n), f"10.0.0.{n}", cpu, 0.0) for n, cpu in enumerate(cpus)]


@pytest.mark.parametrize(
    ("on", "address"),
    [
        ("ray", "auto"),
        ("ray://auto", "auto"),
        ("ray://local", "local"),
        ("ray://head:6379", "head:6379"),
        ("ray://[::1]:6379", "[::1]:6379"),
    ],
)
def test_an_address_is_read(on, address):
    assert parse_address(on) == address


@pytest.mark.parametrize("on", ["", "slurm", "ray://head", "ray://head:0", "ray://head:x", "ray:head:1"])
def test_another_address_is_refused(on):
    with pytest.raises(UsageError, match="names no place to run"):
        parse_address(on)


@pytest.mark.parametrize(
    ("cpus", "processes", "share"),
    [((8,), 3, 1.0), ((2,), 3, 0.5), ((2, 2, 2), 6, 1.0), ((1, 1, 1), 5, 0.5), ((1, 1, 1), 7, 0.3333)],
)
def test_all_processes_fit_the_cores(cpus, processes, share):
    found = core_share(nodes(*cpus), processes)
    assert found == share
    # As many as are asked for do fit, node by node.
    assert sum(int(cpu / found + 1e-9) for cpu in cpus) >= processes


def test_more_than_a_cluster_can_hold_is_refused():
    with pytest.raises(UsageError, match="5000 processes do not fit"):
        core_share(nodes(1, 2), 5000)


def test_where_no_cluster_runs_it_is_said(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("psutil.process_iter", lambda names: [])
    with pytest.raises(UsageError, match="no Ray cluster runs here"):
        raycluster.open_cluster("auto")


def test_nothing_at_an_address_is_said():
    with pytest.raises(UsageError, match="no Ray cluster answers at `127.0.0.1:9`"):
        refuse_open("127.0.0.1:9")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--on", "mars"), "`--on mars` names no place to run"),
        (("--gpus-per-worker", "1"), "an option was given that is for Ray"),
        (("--on", "ray", "--env", "NOWHERE_SET"), "`--env NOWHERE_SET`: there is no such variable here"),
        (("--on", "ray://127.0.0.2:9"), "no Ray cluster answers at `127.0.0.2:9`"),
    ],
)
def test_what_cannot_work_is_refused_at_once(tmp_path, given, message):
    (tmp_path / "train.py").touch()
    code, out, err = run_command("run", "--folder", tmp_path / "run", *given, tmp_path / "train.py")
    assert (code, out) == (2, "")
    assert message in err


@pytest.mark.slow
@pytest.mark.alone
def test_a_cluster_without_a_token_is_open_and_one_with_it_is_not(tmp_path):
    with ray_nodes({}) as open_one:
        assert probe(open_one.address) == "open"
        with pytest.raises(UsageError, match="lets in everyone who reaches it"):
            refuse_open(open_one.address)
    given = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
    script = tmp_path / "train.py"
    script.write_text(
        "import os; print(os.environ['SHOESTRING_SHARDS'][:6], os.environ['SHOESTRING_KEYS'] or '-')"
    )
    with ray_nodes({}, **given) as closed_one:
        assert probe(closed_one.address) == "closed"
        refuse_open(closed_one.address)
        with RayCommand(
            closed_one, "run", "--on", closed_one.on, "--workers", "2", "--folder", tmp_path / "run", script
        ) as command:
            code, out, err = command.finish()
    assert code == 0, err
    # One node: shards are reached without a network, and need no keys.
    assert sorted(out.splitlines()) == ["[worker 1] ipc:// -", "ipc:// -"]
    assert TOKEN not in out + err


@pytest.mark.slow
@pytest.mark.alone
def test_a_cluster_of_its_own_is_gone_afterwards(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import os; print(os.environ['RAY_AUTH_MODE'], os.environ['SHOESTRING_WORKER'])")
    kept = Path.home() / ".ray" / "auth_token"
    was_kept = kept.exists()
    with short_folder() as folder:
        environment = {**ENVIRONMENT, "RAY_TMPDIR": str(folder)}
        code, out, err = run_command(
            "run",
            "--on",
            "ray://local",
            "--workers",
            "1",
            "--folder",
            tmp_path / "run",
            script,
            **environment,
        )
        assert code == 0, err
        assert wait_gone(processes_of(folder)) == []
    assert out == "token 0\n"
    assert kept.exists() == was_kept  # its token is for this run alone
