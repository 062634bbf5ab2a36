"""The tables in documents are those of the committed results."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def draw():
    spec = importlib.util.spec_from_file_location("draw", ROOT / "benchmarks" / "draw.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", draw().DOCUMENTS)
def test_tables_are_the_committed_results(name):
    text = (ROOT / name).read_text()
    assert draw().renew(text) == text, "run `python benchmarks/draw.py`"


def test_a_table_that_was_changed_by_hand_is_noticed():
    text = (ROOT / "docs" / "benchmark.md").read_text()
    changed = text.replace("| ddp |", "| DDP |")
    assert changed != text
    assert draw().renew(changed) == text
