"""What every command of `shoestring bench` has in common: where its results go, and what they say."""

import json

import pytest

from shoestring.cli import env, main
from shoestring.cli.bench import app
from shoestring.cli.bench.options import check_output, deliver, describe_machine
from shoestring.errors import UsageError

COMMANDS = {entry.callback.__name__: entry for entry in app.registered_commands}


def test_there_are_commands_to_check():
    assert set(COMMANDS) == {"codec", "wire"}


def test_help_lists_what_is_left(capsys):
    with pytest.raises(SystemExit) as left:
        main(["bench", "--help"])
    out, err = capsys.readouterr()
    assert (left.value.code, err) == (0, "")
    assert all(f" {name} " in out for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_command_has_a_file_and_examples_of_its_own(name):
    assert COMMANDS[name].callback.__module__ == f"shoestring.cli.bench.{name}"
    title, *examples = COMMANDS[name].epilog.splitlines()
    assert title == "[bold]Examples[/bold]"
    assert examples
    for example in examples:
        assert example.split()[:3] == ["shoestring", "bench", name]


@pytest.mark.parametrize("name", COMMANDS)
def test_command_refuses_a_missing_folder_before_it_measures(capsys, tmp_path, name):
    with pytest.raises(SystemExit) as left:
        main(["bench", name, "--json", "--output", str(tmp_path / "missing" / "it.json")])
    assert left.value.code == 2
    assert capsys.readouterr() == (
        "",
        f"error: there is no folder `{tmp_path / 'missing'}`\n\nhint: make it, or give another `--output`\n",
    )


def test_output_may_be_left_out_or_be_in_a_folder_that_is_there(tmp_path):
    check_output(None)
    check_output(tmp_path / "it.json")
    with pytest.raises(UsageError, match="there is no folder"):
        check_output(tmp_path / "missing" / "it.json")


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("has_output", [False, True])
def test_result_goes_where_it_is_asked_for(capsys, tmp_path, as_json, has_output):
    result = {"machine": {"quick": True}, "rows": [{"figure": 0.5}, {"figure": None}]}
    text = json.dumps(result, indent=2) + "\n"
    file = tmp_path / "it.json"
    deliver(result, file if has_output else None, as_json)
    assert capsys.readouterr() == (text if as_json else "", "")
    assert [path.read_text() for path in tmp_path.iterdir()] == [text] * has_output


def test_result_that_is_no_json_is_refused_and_the_file_left_alone(capsys, tmp_path):
    file = tmp_path / "it.json"
    file.write_text("before")
    with pytest.raises(ValueError, match="not JSON compliant"):
        deliver({"figure": float("nan")}, file, True)
    assert file.read_text() == "before"
    assert capsys.readouterr() == ("", "")


def test_machine_is_told_with_its_load_and_what_a_command_adds():
    found = describe_machine(0.25, cores=1, quick=False)
    facts = env.collect()
    assert found == {**facts, "load_before": 0.25, "cores": 1, "quick": False}
    assert list(found) == [*facts, "load_before", "cores", "quick"]
