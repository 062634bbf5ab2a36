"""Every setting has one value whichever way it is given, and the first way counts."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer

from shoestring.cli.options import given, with_settings
from shoestring.config import (
    CONFIG_VARIABLE,
    Launch,
    Run,
    Setting,
    from_environment,
    from_file,
    from_values,
    gather,
    of,
    options,
    settings,
)
from shoestring.errors import UsageError
from tests.docs.blocks import blocks_of

OWNERS = (Run, Launch)
ALL = [(owner, one) for owner in OWNERS for one in settings(owner)]
GIVEN = [(owner, one) for owner, one in ALL if not one.about.is_told]
NAMES = [f"{owner.__name__}.{one.name}" for owner, one in ALL]
GIVEN_NAMES = [f"{owner.__name__}.{one.name}" for owner, one in GIVEN]
SETTINGS = Path(__file__).parents[2] / "docs" / "settings.md"

# Of each type a value that is no default, in Python and as an option or variable.
EXAMPLES: dict[type, tuple[Any, str]] = {
    str: ("tcp:7", "tcp:7"),
    int: (7, "7"),
    float: (12.5, "12.5"),
    bool: (True, "yes"),
    Path: (Path("/a b/c"), "/a b/c"),
    tuple: (("a", "b=c"), "a,b=c"),
}


def toml_of(value: Any) -> str:
    if isinstance(value, bool):
        return "true"
    if isinstance(value, tuple):
        return "[" + ", ".join(map(toml_of, value)) + "]"
    return f'"{value}"' if isinstance(value, str | Path) else str(value)


def from_command_line(*words: str) -> dict[str, Any]:
    """What a command that has an option for every setting is given."""
    found: dict[str, Any] = {}

    @with_settings(options())
    def command(**named: Any) -> None:
        found.update(given(named))

    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(command)
    typer.main.get_command(app)(list(words), standalone_mode=False)
    return found


def option_of(setting: Setting, value: Any, text: str) -> list[str]:
    if setting.kind is bool:
        return [setting.option]
    if setting.kind is tuple:
        return [word for part in value for word in (setting.option, part)]
    return [setting.option, text]


@pytest.mark.parametrize(("owner", "setting"), GIVEN, ids=GIVEN_NAMES)
def test_every_way_gives_the_same_value(tmp_path: Path, owner: Any, setting: Setting) -> None:
    value, text = EXAMPLES[setting.kind]
    assert value != setting.default
    (tmp_path / "run.toml").write_text(f"{setting.name} = {toml_of(value)}\n")
    ways = [
        from_command_line(*option_of(setting, value, text)),
        of(owner, from_environment(owner, {setting.variable: text})),
        from_file(tmp_path / "run.toml"),
        from_values({setting.name: value}),
        gather({setting.name: value}, {}),
        gather({}, {setting.variable: text}),
        gather({}, {CONFIG_VARIABLE: str(tmp_path / "run.toml")}),
        gather({}, {}, tmp_path / "run.toml"),
    ]
    assert ways == [{setting.name: value}] * len(ways)
    assert [type(way[setting.name]) for way in ways] == [type(value)] * len(ways)
    assert getattr(owner(**ways[0]), setting.name) == value


@pytest.mark.parametrize("setting", settings(Run), ids=lambda one: one.name)
def test_a_launcher_hands_every_setting_on(setting: Setting) -> None:
    value, _ = EXAMPLES[setting.kind]
    place = {"workers": 9, "shards": ("ipc:///a",)}  # in which worker 7 has a place
    run = Run(**{**place, setting.name: value})
    assert getattr(Run.here(run.to_environment()), setting.name) == value


@pytest.mark.parametrize(("owner", "setting"), ALL, ids=NAMES)
def test_nothing_given_is_the_default(owner: Any, setting: Setting) -> None:
    assert gather({}, {}) == {}
    assert from_environment(owner, {setting.variable: ""}) == {}
    assert getattr(owner(), setting.name) == setting.default


def test_the_first_way_counts(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("every = 3\nretain = 3\ntimeout_s = 3")
    environment = {"SHOESTRING_EVERY": "2", "SHOESTRING_RETAIN": "2"}
    assert gather({"every": 1}, environment, file) == {"every": 1, "retain": 2, "timeout_s": 3.0}
    run = Run.here({**environment, CONFIG_VARIABLE: str(file)})
    assert (run.every, run.retain, run.timeout_s) == (2, 2, 3.0)


def test_names_are_each_used_once() -> None:
    assert [one.name for owner in OWNERS for one in settings(owner)] == [
        one.name for owner in OWNERS for one in fields(owner)
    ]
    for names in ([one.variable for _, one in ALL], [one.option for _, one in GIVEN]):
        assert len(names) == len(set(names))


def test_time_outs_say_what_a_wrong_value_does() -> None:
    for _, one in ALL:
        if one.name.endswith("_s"):
            assert "Too short: " in one.about.help, one.name
            assert "Too long: " in one.about.help, one.name
            assert one.kind is float


def test_the_environment_gives_the_run_back() -> None:
    run = Run(
        name="r",
        worker=1,
        workers=3,
        local=1,
        shards=("tcp://127.0.0.1:1", "ipc:///a/b"),
        resume=Path("/c/step-000000007"),
        codec="dct:block=8,step=2.0",
        incarnation=2,
    )
    assert Run.here(run.to_environment()) == run
    assert Run.here(Run().to_environment()) == Run()
    assert Run.here({}) == Run()


def test_workers_do_not_read_the_launchers_file() -> None:
    environment = {CONFIG_VARIABLE: "/no/such/file"}
    assert Run.here(environment | Run().to_environment()) == Run()


def test_who_starts_a_process_says_how_many_workers_there_are(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("workers = 4\nshards = 2\nevery = 5")
    assert Run.here({CONFIG_VARIABLE: str(file)}) == Run(every=5)


@pytest.mark.parametrize(
    "change",
    [
        {"WORKER": "x"},
        {"WORKER": "3"},
        {"WORKER": "-1"},
        {"WORKERS": "2"},
        {"TIMEOUT_S": "soon"},
        {"TIMEOUT_S": "nan"},
        {"TIMEOUT_S": "0"},
        {"EVERY": "-1"},
        {"RETAIN": "0"},
    ],
)
def test_nonsense_is_refused(change: dict[str, str]) -> None:
    with pytest.raises(UsageError):
        Run.here({f"SHOESTRING_{name}": value for name, value in change.items()})


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("evry = 5", "there is no setting `evry`", "did you mean `every`?"),
        ("time_out = 5", "there is no setting `time_out`", "did you mean `timeout_s`?"),
        ("worker = 1", "there is no setting `worker`", "did you mean `workers`?"),
        ("every = 'often'", "`every` is `often`, expected a whole number from 0", "Rounds between"),
        ("every = true", "`every` is `True`, expected a whole number", "Rounds between"),
        ("shards = 0", "`shards` is `0`, expected a whole number from 1 to 256", "hold the parameters"),
        ("env = ['a', 1]", "expected a list of texts", "variable"),
        ("timeout_s = '5'", "expected a number from 0.001 to 1e+06", "Too short"),
        ("every 5", "is not TOML", "every = 500"),
    ],
)
def test_what_is_wrong_in_a_file_is_said(tmp_path: Path, text: str, message: str, hint: str) -> None:
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(UsageError) as caught:
        from_file(tmp_path / "run.toml")
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_a_file_that_is_not_there_is_said() -> None:
    with pytest.raises(UsageError, match="`/no/such/file` cannot be read"):
        gather({}, {}, Path("/no/such/file"))


@pytest.mark.parametrize("given", [{"every": -1}, {"timeout_s": 0.0}, {"retain": 0}])
def test_limits_hold_in_python_too(given: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="expected"):
        Run(**given)


def table() -> str:
    """The table of docs/settings.md."""
    rows = ["| key | option | variable | default | meaning |", "|---|---|---|---|---|"]
    for _, one in GIVEN:
        default = one.text(one.default) and f"`{one.text(one.default)}`"
        meaning = one.about.help.replace("|", "\\|")
        rows.append(f"| `{one.name}` | `{one.option}` | `{one.variable}` | {default} | {meaning} |")
    return "\n".join(rows) + "\n"


def test_the_documents_table_lists_every_setting() -> None:
    assert table() in SETTINGS.read_text(), f"put this table into {SETTINGS}:\n{table()}"


def test_the_documents_example_is_a_file_that_is_read(tmp_path: Path) -> None:
    (example,) = [block for block in blocks_of(SETTINGS, SETTINGS.read_text()) if block.language == "toml"]
    (tmp_path / "run.toml").write_text(example.text)
    assert from_file(tmp_path / "run.toml") == {
        "workers": 4,
        "codec": "dct",
        "checkpoint": Path("checkpoints"),
        "every": 500,
        "timeout_s": 120.0,
    }
