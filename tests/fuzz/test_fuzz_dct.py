"""A short run of the fuzzer. `fuzz_dct.py` beside this file runs longer ones."""

import json
import os
import subprocess
import sys

from tests.docs.blocks import ROOT
from tests.fuzz.dct_streams import LAYOUTS, seeds
from tests.fuzz.fuzz_dct import BATCH, Fuzzer, Summary

SEED = 20


def test_twenty_thousand_streams():
    print(f"seed {SEED}")
    fuzzer, summary = Fuzzer(SEED, compare_every=25), Summary(seed=SEED)
    for batch in range(20_000 // BATCH):
        summary.add(fuzzer.run(batch))
    assert summary.findings == []
    assert summary.is_clean
    assert summary.streams == 20_000 == summary.errors + summary.decoded
    assert summary.decoded > 2000  # or the mutations no longer reach the inverse transform


def test_seeds_decode_as_they_are():
    fuzzer, summary = Fuzzer(SEED), Summary()
    for seed in seeds():
        assert fuzzer._try(seed.payload, seed.layout, 0.5, True, summary) == ""
        assert bytes(seed.rebuild(list(seed.chunks))) == seed.payload
    assert summary.decoded == summary.streams >= 7 * len(LAYOUTS)


def test_command_prints_a_summary():
    command = [
        sys.executable,
        "tests/fuzz/fuzz_dct.py",
        "--streams",
        "1500",
        "--seed",
        "3",
        "--processes",
        "2",
    ]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    summary = json.loads(done.stdout)
    assert summary["streams"] == 1500
    assert summary["seed"] == 3
    assert "seed 3" in done.stderr
    found = ("crashes", "hangs", "foreign_exceptions", "broken_promises")
    assert [summary[name] for name in found] == [0, 0, 0, 0]
