"""PEFT: adapters on a frozen base train as under DistributedDataParallel, and they alone travel."""

import json

import pytest
from safetensors.numpy import load_file

from tests.integrations.launch import ROOT, Example, run_shoestring

EXAMPLE = Example("peft_digits")
STEPS = 8


def sent(folder):
    """Bytes that the first worker pushed and got back in rounds of its first model, by its event log."""
    events = [json.loads(line) for line in (folder / "events-worker-0.jsonl").read_text().splitlines()]
    steps = [event for event in events if event["event"] == "step"]
    return sum(step["up_bytes"] for step in steps), sum(step["down_bytes"] for step in steps)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """What `adapters.py` found, and where its event logs are."""
    folder = tmp_path_factory.mktemp("adapters")
    output = run_shoestring(ROOT / "tests" / "integrations" / "adapters.py", folder=folder)
    return json.loads(next(line for line in output.splitlines() if line.startswith("{"))), folder


@pytest.mark.parametrize("dtype", ["torch.float32", "torch.bfloat16"])
def test_adapters_train_as_under_ddp(pair, dtype):
    found = pair[0][dtype]
    assert found["same_bits"]
    assert found["own"] == found["ddp"]
    assert found["own"][-1] < found["own"][0]


def test_only_adapters_travel(pair):
    found, folder = pair
    first = found["torch.float32"]
    assert first["frozen"] > 9 * first["trained"]
    for count in sent(folder):
        assert 4 * STEPS * first["trained"] <= count < 1.1 * 4 * STEPS * first["trained"]


def test_the_example_saves_adapters_alone(tmp_path):
    assert EXAMPLE.changed_lines() == (1, 3)
    output = run_shoestring(EXAMPLE.changed(tmp_path), "--out", tmp_path / "adapters")
    assert "epoch 1, loss 2." in output
    saved = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    assert saved
    assert all("lora_" in name for name in saved)
