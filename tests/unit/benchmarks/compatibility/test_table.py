"""Tables of results: a line a script, a column a mode."""

from benchmarks.compatibility import table
from benchmarks.compatibility.cases import CASES


def row(case, mode, result, message="", codec="float32", group="models"):
    return {
        "case": case, "group": group, "mode": mode, "codec": codec,
        "result": result, "difference": None, "message": message,
    }  # fmt: skip


ROWS = [
    row("one", "wrap-model", "equal"),
    row("two", "wrap-model", "refused", "no | (hint: yes)"),
    row("one", "local", "trains"),
    row("two", "local", "refused", "no | (hint: yes)"),
    row("one", "wrap-model", "trains", codec="dct"),
    row("three", "wrap-model", "equal", group="data"),
]


def test_only_columns_with_rows_are_shown():
    assert table.lines(ROWS[:4]) == [
        "| script | `wrap(model)` | `local:2` |",
        "|---|---|---|",
        "| one | equal | trains |",
        "| two | refused | refused |",
    ]


def test_a_script_that_a_mode_does_not_have_is_a_dash():
    assert table.lines(ROWS[:5])[-1] == "| two | refused | refused | - |"


def test_what_is_said_is_shown_once():
    assert table.refusals(ROWS) == [
        "| what is said | scripts |",
        "|---|---|",
        "| no \\| (hint: yes) | two (`wrap(model)`); two (`local:2`) |",
    ]


def test_every_group_of_cases_has_a_table():
    assert {case.group for case in CASES.values()} == set(table.GROUPS)
    made = table.tables({"rows": ROWS})
    assert made["compatibility data"][-1] == "| three | equal |"
