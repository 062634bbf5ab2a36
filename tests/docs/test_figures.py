"""The tables in documents are those of the committed results."""

from pathlib import Path

import pytest

from benchmarks import draw

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", draw.DOCUMENTS)
def test_tables_are_the_committed_results(name):
    text = (ROOT / name).read_text()
    assert draw.renew(text) == text, "run `python -m benchmarks.draw`"


def test_a_table_that_was_changed_by_hand_is_noticed():
    text = (ROOT / "docs" / "benchmark.md").read_text()
    changed = text.replace("| ddp |", "| DDP |")
    assert changed != text
    assert draw.renew(changed) == text
