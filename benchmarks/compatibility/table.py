"""What works and what does not, as tables for a person."""

from collections.abc import Sequence
from typing import Any

Figures = dict[str, Any]
_COLUMNS = (
    ("wrap-model", "float32", "`wrap(model)`"),
    ("wrap-optimizer", "float32", "`wrap(model, optimizer)`"),
    ("local", "float32", "`local:2`"),
    ("wrap-model", "dct", "`wrap(model)`, `dct`"),
    ("wrap-optimizer", "dct", "`wrap(model, optimizer)`, `dct`"),
    ("local", "dct", "`local:2`, `dct`"),
)


def lines(rows: Sequence[Figures]) -> list[str]:
    """One line a case, one column a mode and codec."""
    found = {(row["case"], row["mode"], row["codec"]): row["result"] for row in rows}
    columns = [one for one in _COLUMNS if any((row["mode"], row["codec"]) == one[:2] for row in rows)]
    text = [
        "| script | " + " | ".join(title for _, _, title in columns) + " |",
        "|---" * (1 + len(columns)) + "|",
    ]
    for case in dict.fromkeys(row["case"] for row in rows):
        cells = [found.get((case, mode, codec), "-") for mode, codec, _ in columns]
        text.append(f"| {case} | " + " | ".join(cells) + " |")
    return text


def refusals(rows: Sequence[Figures]) -> list[str]:
    """What is said where a script is refused, or went wrong."""
    said: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row["message"]:
            modes = said.setdefault((row["case"], row["message"]), [])
            modes.append(f"{row['mode']}, {row['codec']}")
    text = ["| script | mode | what is said |", "|---|---|---|"]
    for (case, message), modes in said.items():
        text.append(f"| {case} | {'; '.join(modes)} | {message.replace('|', chr(92) + '|')} |")
    return text
