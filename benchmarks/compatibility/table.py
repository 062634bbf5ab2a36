"""What works and what does not, as tables for a person."""

from collections.abc import Sequence
from typing import Any

Figures = dict[str, Any]

GROUPS = (  # as files in `cases/`
    "optimizers",
    "groups",
    "schedules",
    "scaling",
    "gradients",
    "freezing",
    "models",
    "copies",
    "saving",
    "precision",
    "adversaries",
    "data",
)
_COLUMNS = (
    ("wrap-model", "float32", "`wrap(model)`"),
    ("wrap-optimizer", "float32", "`wrap(model, optimizer)`"),
    ("local", "float32", "`local:2`"),
    ("wrap-model", "dct", "`wrap(model)`, `dct`"),
    ("wrap-optimizer", "dct", "`wrap(model, optimizer)`, `dct`"),
    ("local", "dct", "`local:2`, `dct`"),
)


def tables(found: Figures) -> dict[str, list[str]]:
    """By name, the lines of the tables in `docs/compatibility.md`."""
    made = {"compatibility refusals": refusals(found["rows"])}
    for group in GROUPS:
        made[f"compatibility {group}"] = lines([row for row in found["rows"] if row["group"] == group])
    return made


def lines(rows: Sequence[Figures]) -> list[str]:
    """One line a script, one column a mode and codec."""
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
    """What is said to whom: one line a text, with the scripts that it is said to."""
    said: dict[str, dict[str, None]] = {}
    for row in rows:
        if row["message"]:
            said.setdefault(row["message"], {})[f"{row['case']} ({_title(row)})"] = None
    text = ["| what is said | scripts |", "|---|---|"]
    for message, scripts in said.items():
        text.append(f"| {message.replace('|', chr(92) + '|')} | {'; '.join(scripts)} |")
    return text


def _title(row: Figures) -> str:
    titles = {(mode, codec): title for mode, codec, title in _COLUMNS}
    return titles[row["mode"], row["codec"]]
