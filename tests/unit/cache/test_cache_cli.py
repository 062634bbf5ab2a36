"""`shoestring fleet cache`: what is stored is shown, what is idle is cleared, what is in use is left."""

import json

import pytest

import shoestring
from shoestring.cli import main


def run(capsys, *args):
    with pytest.raises(SystemExit) as left:
        main(["fleet", "cache", *map(str, args)])
    return left.value.code, *capsys.readouterr()


@pytest.fixture
def folder(tmp_path):
    """Two idle datasets and one in use."""
    made = []
    for name, version, wanted in (("words", "", 2), ("words", "2", 3), ("numbers", "", 1)):
        made.append(shoestring.cached(["x"] * 4, name=name, version=version, folder=tmp_path / "cache"))
        for index in range(wanted):
            assert made[-1][index] == "x"
    made[0].close()
    made[1].close()
    yield tmp_path / "cache"
    made[2].close()


def test_ls_shows_every_dataset(folder, capsys):
    code, out, _ = run(capsys, "ls", "--dir", folder, "--json")
    facts = json.loads(out)
    assert (code, facts["folder"]) == (0, str(folder))
    shown = [
        (row["name"], row["version"], row["samples"], row["stored"], row["is_used"])
        for row in facts["datasets"]
    ]
    assert shown == [("numbers", "", 4, 1, True), ("words", "", 4, 2, False), ("words", "2", 4, 3, False)]
    for row in facts["datasets"]:
        assert 0 < row["used_bytes"] <= row["reserved_bytes"] <= facts["limit_bytes"]


def test_ls_is_readable(folder, capsys):
    code, out, err = run(capsys, "ls", "--dir", folder)
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["numbers", "words", "words"]
    assert "3 of 4 samples" in out.splitlines()[2]
    assert out.splitlines()[0].endswith("in use")
    assert str(folder) in err


def test_looking_does_not_use(folder, capsys):
    run(capsys, "ls", "--dir", folder)
    _, out, _ = run(capsys, "ls", "--dir", folder, "--json")
    assert [row["is_used"] for row in json.loads(out)["datasets"]] == [True, False, False]


def test_clear_removes_what_is_idle(folder, capsys):
    assert run(capsys, "clear", "--dir", folder) == (
        0,
        "words\nwords 2\n",
        "`numbers` is in use and was left\n",
    )
    _, out, _ = run(capsys, "ls", "--dir", folder, "--json")
    assert [row["name"] for row in json.loads(out)["datasets"]] == ["numbers"]


def test_clear_by_name(folder, capsys):
    assert run(capsys, "clear", "words", "--dir", folder)[:2] == (0, "words\nwords 2\n")
    code, out, err = run(capsys, "clear", "numbers", "--dir", folder)
    assert (code, out) == (1, "")
    assert "`numbers` is in use" in err
    code, _, err = run(capsys, "clear", "words", "--dir", folder)
    assert code == 1
    assert "no dataset `words` is cached" in err
