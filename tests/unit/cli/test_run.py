"""`shoestring run`: one script, several workers, one result."""

import json

import pytest

from shoestring.observe.events import Tail
from tests.unit.launch.processes import run_command
from tests.unit.observe.eventfile import read_scalars

TRAIN = """
import sys
import shoestring, torch

here = shoestring.init()
torch.manual_seed(here.worker)
model = torch.nn.Sequential(torch.nn.Linear(40, 900), torch.nn.Linear(900, 40))
model, optimizer = shoestring.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
for _ in range(3):
    model(torch.randn(8, 40)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
total = sum(parameter.double().sum() for parameter in model.parameters()).item()
print(here.worker, here.workers, len(here.shards), total.hex(), *sys.argv[1:])
"""


def test_workers_train_together(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    config = tmp_path / "run.toml"
    config.write_text('shards = 2\ncodec = "float32"\nworkers = 5')
    options = [
        "--workers",
        "2",
        "--config",
        config,
        "--folder",
        tmp_path / "run",
        "--json",
    ]
    # What comes after the script is the script's, also where it looks like ours.
    code, out, err = run_command("run", *options, script, "--workers", "7")
    assert code == 0, err
    *lines, summary = out.splitlines()
    first, second = sorted(line.removeprefix("[worker 1] ").split() for line in lines)
    assert first[:3] == ["0", "2", "2"]
    assert second[:3] == ["1", "2", "2"]
    assert first[3:] == second[3:]  # the same bits, and the same arguments
    assert first[4:] == ["--workers", "7"]
    found = json.loads(summary)
    assert found == json.loads((tmp_path / "run" / "summary.json").read_text())
    assert found.pop("seconds") > 0
    assert found == {
        "workers": 2,
        "shards": 2,
        "exit_codes": [0, 0],
        "failed": None,
        "joined": 2,
        "warning": None,
        "folder": str(tmp_path / "run"),
    }
    assert f"event logs are in {tmp_path / 'run'}" in err
    assert "warning" not in err


ALONE = "all 2 workers ran the script each by itself, with results of its own: it "
CURE = ". Write `model = shoestring.wrap(model)` behind the line that builds the model"


@pytest.mark.parametrize(
    ("source", "why"),
    [("print('trained')", "never joined the run"), (
        "from shoestring.launch.start import init; init()", "called `shoestring.init` but never `wrap`"
    )],
    ids=["no init", "no wrap"],
)  # fmt: skip
def test_a_script_that_never_joins_is_told_so(tmp_path, source, why):
    script = tmp_path / "plain.py"
    script.write_text(source)
    options = ("--workers", "2", "--folder", tmp_path / "run", "--json")
    code, out, err = run_command("run", *options, script)
    assert code == 0, err
    assert err.splitlines()[-1] == f"shoestring: warning: {ALONE}{why}{CURE}"
    summary = json.loads(out.splitlines()[-1])
    assert (summary["joined"], summary["warning"]) == (0, ALONE + why + CURE)
    (event,) = [event for event in Tail(tmp_path / "run").poll() if event["event"] == "warn"]
    assert (event["who"], event["text"]) == ("launcher", summary["warning"])


@pytest.mark.parametrize(
    ("workers", "source"), [("1", ""), ("2", "raise SystemExit(3)")], ids=["alone", "failed"]
)
def test_one_worker_and_one_that_failed_are_not_told_that_nobody_joined(tmp_path, workers, source):
    script = tmp_path / "plain.py"
    script.write_text(source)
    _, _, err = run_command("run", "--workers", workers, "--folder", tmp_path / "run", script)
    assert "warning" not in err
    assert not (tmp_path / "run" / "events-launcher.jsonl").exists()


def test_a_tracker_is_told_how_the_run_goes(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        TRAIN.replace(
            "    optimizer.step()\n", "    optimizer.report(loss=0.5, samples=8)\n    optimizer.step()\n"
        )
    )
    options = ("--workers", "2", "--tracker", "tensorboard", "--folder", tmp_path / "run")
    code, _, err = run_command("run", *options, script)
    assert code == 0, err
    (file,) = (tmp_path / "run" / "tensorboard").iterdir()  # of the first worker alone
    scalars = read_scalars(file)
    last = {name: value for name, step, value in scalars if step == 3}
    names = (
        "loss",
        "samples_per_s",
        "up_bytes_per_step",
        "down_bytes_per_step",
        "smaller",
        "waiting",
        "level",
    )
    assert {f"shoestring/{name}" for name in names} <= last.keys()
    assert (last["shoestring/loss"], last["shoestring/level"]) == (0.5, 0.0)
    assert 0 <= last["shoestring/waiting"] <= 1


def test_a_module_that_fails_is_named_with_its_last_words(tmp_path):
    (tmp_path / "broken.py").write_text("import sys; print('the end', file=sys.stderr); sys.exit(3)")
    options = ["--workers", "1", "--folder", tmp_path / "run"]
    code, out, err = run_command("run", *options, "-m", "broken", PYTHONPATH=str(tmp_path))
    assert (code, out) == (3, "")
    assert err == (
        "the end\n"
        "error: worker 0 ended with exit code 3, so the run was stopped; its last words:\n"
        "  the end\n"
        "\n"
        f"hint: the event logs are in `{tmp_path / 'run'}`\n"
    )


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("missing.py",), "there is no script `missing.py`"),
        (("--codec", "nothing", __file__), "there is no codec `nothing`"),
        (("--policy", "nothing", __file__), "no sync policy `nothing`"),
        (("--tracker", "nothing", __file__), "there is no tracker `nothing`"),
        (("--tracker", "tensorboard", "--on", "ray", __file__), "would stay behind on a Ray node"),
        (("--every", "10", __file__), "no folder for checkpoints"),
        (("--config", "nowhere.toml", __file__), "`nowhere.toml` cannot be read"),
        (("--workers", "0", __file__), "'--workers'"),
        ((), "'script'"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(tmp_path, args, message):
    code, out, err = run_command("run", "--folder", tmp_path / "run", *args)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert message in err.splitlines()[0]
    assert not (tmp_path / "run").exists()
