"""Lightning with `ShoestringStrategy`: the losses of its own `ddp`, also when resumed."""

import csv

import pytest

from tests.integrations.launch import Example, run_ddp, run_shoestring

EXAMPLE = Example("lightning_digits")
CLOSE = {"rel": 0, "abs": 1e-4}


def logged(folder):
    """What was logged, by step and name."""
    with (folder / "lightning_logs" / "version_0" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    return {
        (int(row["step"]), name): float(row[name])
        for row in rows
        for name in ("loss", "accuracy")
        if row[name]
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Four epochs under `ddp` and through Shoestring; the last two once more, resumed."""
    folder = tmp_path_factory.mktemp("lightning")
    script = EXAMPLE.changed(folder)
    run_ddp(EXAMPLE.plain, "--out", folder / "ddp", "--devices", 2)
    run_shoestring(script, "--out", folder / "own")
    run_shoestring(script, "--out", folder / "half", "--epochs", 2)
    run_shoestring(script, "--out", folder / "resumed", "--resume", folder / "half" / "last.ckpt")
    return folder


def test_a_script_changes_in_two_lines():
    assert EXAMPLE.changed_lines() == (0, 2)


def test_losses_and_accuracies_are_those_of_ddp(runs):
    own = logged(runs / "own")
    assert len(own) == 48 + 4
    assert own[47, "loss"] < 1 < 2 < own[0, "loss"]
    assert own == pytest.approx(logged(runs / "ddp"), **CLOSE)


def test_a_resumed_run_goes_on_with_the_same_bits(runs):
    own = logged(runs / "own")
    assert logged(runs / "resumed") == {key: value for key, value in own.items() if key[0] >= 24}
