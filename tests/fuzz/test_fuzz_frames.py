"""A short run of the fuzzer. `fuzz_frames.py` beside this file runs longer ones."""

import json
import os
import subprocess
import sys

from tests.docs.blocks import ROOT
from tests.fuzz.fuzz_frames import fuzz

SEED = 21


def test_five_thousand_messages():
    print(f"seed {SEED}")
    summary = fuzz(5000, SEED)
    assert summary.findings == []
    assert summary.is_clean
    assert summary.messages == 5000 == summary.errors + summary.decoded
    assert summary.decoded > 200  # or no mutation gets past the checksum any more


def test_command_prints_a_summary():
    command = [sys.executable, "tests/fuzz/fuzz_frames.py", "--messages", "500", "--seed", "3"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True, timeout=60)
    summary = json.loads(done.stdout)
    assert (summary["messages"], summary["seed"]) == (500, 3)
    assert (summary["foreign_exceptions"], summary["broken_promises"]) == (0, 0)
    assert "seed 3" in done.stderr
