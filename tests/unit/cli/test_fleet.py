"""`shoestring fleet` as a user runs it: real training scripts on two CPU devices."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shoestring.fleet.measure.profile import Profile, Sample
from shoestring.fleet.run.database import Database
from tests.unit.launch.processes import Command, clean_environment, run_command, wait_gone

EXAMPLES = Path(__file__).parents[3] / "examples" / "fleet"
CORES = sorted(os.sched_getaffinity(0))
GIB = 2**30
LIMIT_S = 240

# Ends with a hash of its parameters; takes its place in the data and its schedule from a checkpoint.
TRAIN = """
import os, sys, time
import shoestring, torch
from torch import nn

here = shoestring.init()
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randint(0, 3, (64,)))
model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.Linear(16, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer = shoestring.wrap(model, optimizer, codec="float32", policy="every:delay=0")
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 400)
shoestring.keep(scheduler)
batches = shoestring.batches(data, int(os.environ["SHOESTRING_BATCH"]))
loader = torch.utils.data.DataLoader(data, batch_sampler=batches)
gate = sys.argv[1]
for _ in shoestring.epochs(15):
    for x, y in loader:
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if optimizer.steps == 100 and gate:
            print("waiting", flush=True)
            while not os.path.exists(os.environ["SHOESTRING_STOP"]):  # until the test has seen it here
                time.sleep(0.01)
print("parameters", optimizer.parameter_hash(), optimizer.steps, scheduler.last_epoch)
"""


def fleet(*arguments, folder):
    done = subprocess.run(
        [sys.executable, "-m", "shoestring", "fleet", *map(str, arguments)],
        env=clean_environment() | {"SHOESTRING_FLEET": str(folder)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "fleet"
    fleet("devices", "--no-measure", "--cpu", f"one={CORES[0]},two={CORES[-1]}", folder=path)
    return path


def write_jobs(tmp_path, gate):
    (tmp_path / "train.py").write_text(TRAIN)
    text = ""
    for name in ("a", "b"):
        text += f'[[job]]\nname = "{name}"\nscript = "train.py"\narguments = ["{gate}"]\n'
        text += "batches = [4]\nsteps = 240\nevery = 100\n"
    path = tmp_path / "jobs.toml"
    path.write_text(text)
    return path


def know(folder):
    """Have profiles there, as if measured."""
    with Database(folder) as database:
        for entry in database.entries():
            for kind in ("one", "two"):
                sample = Sample(4, 0.01, 0.0, GIB // 2, 1.0, 1.0, steps=9)
                profile = Profile(entry.key, kind, (sample,), memory_bytes=GIB)
                database.save_profile(entry.key, kind, profile.to_json())


def hashes(folder):
    found = {}
    for name in ("a", "b"):
        text = (folder / "jobs" / name / "output.log").read_text()
        found[name] = re.findall(r"parameters (\w+ \d+ \d+)", text)
    return found


def test_jobs_are_added_listed_explained_and_removed(tmp_path, folder):
    path = write_jobs(tmp_path, "")
    assert json.loads(fleet("add", path, "--json", folder=folder)) == {"added": ["a", "b"]}
    _, _, err = run_command("fleet", "add", path, SHOESTRING_FLEET=str(folder))
    assert err.startswith("error: there is a job `a` already")
    listed = json.loads(fleet("ls", "--json", folder=folder))
    assert [(job["name"], job["state"], job["steps_total"]) for job in listed] == [
        ("a", "queued", 240),
        ("b", "queued", 240),
    ]
    assert fleet("why", "a", folder=folder) == (
        "`a` waits, as no process runs this fleet: it starts with `shoestring fleet run`.\n"
    )
    assert "waits to be profiled" in fleet("plan", folder=folder)
    know(folder)
    assert set(json.loads(fleet("plan", "--json", folder=folder))["reasons"]) == {"a", "b"}
    fleet("rm", "a", folder=folder)
    assert [job["name"] for job in json.loads(fleet("ls", "--json", folder=folder))] == ["b"]
    _, _, err = run_command("fleet", "logs", "a", SHOESTRING_FLEET=str(folder))
    assert err.startswith("error: there is no job `a`")


@pytest.mark.slow
def test_ctrl_c_stops_at_a_checkpoint_and_the_next_run_ends_with_the_same_bits(tmp_path, folder):
    fleet("add", write_jobs(tmp_path, "gate"), folder=folder)
    know(folder)
    with Command("fleet", "run", "--planner", "fifo", SHOESTRING_FLEET=str(folder)) as command:
        logs = [folder / "jobs" / name / "output.log" for name in ("a", "b")]
        deadline = time.monotonic() + 60
        while not all(log.exists() and "waiting" in log.read_text() for log in logs):
            assert command.process.poll() is None, command.finish()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        children = command.note_children()
        code, _, err = command.finish(signal.SIGINT)
        assert code == 130, err
        assert wait_gone(children) == []
    stopped = json.loads(fleet("ls", "--json", folder=folder))
    # They wait right behind a checkpoint, and leave when they begin the next step.
    assert [(job["state"], job["steps_done"]) for job in stopped] == [("stopped", 100)] * 2
    assert "goes on from a checkpoint at about step 100" in fleet("why", "b", folder=folder)
    fleet("run", "--planner", "fifo", folder=folder)
    resumed = hashes(folder)

    whole = tmp_path / "whole"
    fleet("devices", "--no-measure", "--cpu", f"one={CORES[0]},two={CORES[-1]}", folder=whole)
    fleet("add", write_jobs(tmp_path, ""), folder=whole)
    know(whole)
    fleet("run", "--planner", "fifo", folder=whole)
    assert resumed == hashes(whole)
    assert [len(found) for found in resumed.values()] == [1, 1]
    assert resumed["a"][0].split()[1:] == ["240", "240"]


@pytest.mark.slow
def test_three_trainings_are_profiled_planned_and_run(tmp_path, folder):
    jobs = "".join(
        f'[[job]]\nname = "{name}"\nscript = "{EXAMPLES / name}.py"\n'
        f'arguments = ["--batch", "{{batch}}", "--steps", "30"]\nbatches = [1]\nsteps = 30\n'
        for name in ("mlp", "conv", "text")
    )
    (tmp_path / "jobs.toml").write_text(jobs)
    fleet("add", tmp_path / "jobs.toml", folder=folder)
    out = fleet("run", "--json", folder=folder)
    assert [(job["name"], job["state"], job["steps_done"]) for job in json.loads(out)] == [
        ("mlp", "done", 30),
        ("conv", "done", 30),
        ("text", "done", 30),
    ]
    assert "after 30 steps" in fleet("logs", "conv", folder=folder)
    profiles = json.loads(fleet("profile", "--json", folder=folder))  # kept: nothing is measured again
    assert {(p["job"], p["kind"]) for p in profiles} == {
        (job, kind) for job in ("mlp", "conv", "text") for kind in ("one", "two")
    }
    bars = json.loads(fleet("timeline", "--json", folder=folder))
    assert {bar["job"] for bar in bars} == {"mlp", "conv", "text"}
    for one in bars:  # a device has one job at a time, as none of these gains by sharing
        others = [bar for bar in bars if bar is not one and bar["device"] == one["device"]]
        assert all(bar["end_at"] <= one["start_at"] or bar["start_at"] >= one["end_at"] for bar in others)
