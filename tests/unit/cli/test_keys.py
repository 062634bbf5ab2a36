"""`shoestring keys`: writes keys once, lists them, shows no secret."""

import json
import stat

import pytest

from shoestring.cli import main
from shoestring.wire import keys


@pytest.fixture(autouse=True)
def place(monkeypatch, tmp_path):
    """An empty folder to work in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SHOESTRING_KEYS", raising=False)
    return tmp_path


def run(capsys, *args):
    with pytest.raises(SystemExit) as left:
        main(["keys", *args])
    out, err = capsys.readouterr()
    return left.value.code, out, err


def test_new_writes_two_files_and_says_where_they_go(capsys, place):
    assert run(capsys, "new", "worker-3") == (
        0,
        "keys/worker-3.secret\nkeys/worker-3.public\n",
        "\nCopy `keys/worker-3.public` to every shard's host; keep the secret where `worker-3` runs.\n",
    )
    assert stat.S_IMODE((place / "keys").stat().st_mode) == 0o700
    assert stat.S_IMODE((place / "keys/worker-3.secret").stat().st_mode) == 0o600
    pair = keys.load_pair(place / "keys/worker-3.secret")
    assert keys.load_public(place / "keys/worker-3.public") == pair.public


def test_new_does_not_replace_a_key(capsys, place):
    run(capsys, "new", "worker-3")
    before = (place / "keys/worker-3.secret").read_bytes()
    assert run(capsys, "new", "worker-3") == (
        2,
        "",
        "error: `keys/worker-3.secret` already exists\n\n"
        "hint: choose another name, or remove it to replace the key of `worker-3`\n",
    )
    assert (place / "keys/worker-3.secret").read_bytes() == before


def test_json_names_files_and_public_keys_alone(capsys, place):
    code, out, err = run(capsys, "new", "shard", "--dir", "ours", "--json")
    assert (code, err) == (0, "")
    pair = keys.load_pair(place / "ours/shard.secret")
    assert json.loads(out) == {
        "name": "shard",
        "public_key": pair.public.decode(),
        "secret": "ours/shard.secret",
        "public": "ours/shard.public",
    }
    code, out, err = run(capsys, "ls", "--dir", "ours", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == [{"name": "shard", "public_key": pair.public.decode(), "has_secret": True}]


def test_ls_shows_names_public_keys_and_whose_secret_is_here(capsys, place, monkeypatch):
    shard, worker = (keys.new(name, place / "k") for name in ("shard", "worker-12"))
    (place / "k/worker-12.secret").unlink()
    monkeypatch.setenv("SHOESTRING_KEYS", "k")
    assert run(capsys, "ls") == (
        0,
        f"shard      {shard.public.decode()}  secret is here\nworker-12  {worker.public.decode()}\n",
        "",
    )


def test_ls_of_an_empty_folder_is_empty(capsys, place):
    (place / "keys").mkdir()
    assert run(capsys, "ls") == (0, "", "")
    assert run(capsys, "ls", "--json") == (0, "[]\n", "")


@pytest.mark.parametrize(
    ("args", "found", "hint"),
    [
        (("new", "../shard"), "`../shard` is no name for a key", "like `worker-3`"),
        (("ls",), "there is no folder `keys`", "shoestring keys new shard --dir keys"),
        (("new",), "name", "shoestring keys new --help"),
    ],
)
def test_mistakes_are_named(capsys, args, found, hint):
    code, out, err = run(capsys, *args)
    assert (code, out) == (2, "")
    first, blank, last = err.splitlines()
    assert first.startswith("error: ")
    assert found in first.lower()
    assert blank == ""
    assert hint in last


def test_help_says_which_host_needs_what(capsys):
    code, out, _ = run(capsys, "--help")
    assert code == 0
    text = " ".join(out.split())
    assert "A shard's host needs `shard.secret`, and NAME.public of every worker" in text
    assert "A worker's host needs its own NAME.secret, and `shard.public`." in text
    assert "shoestring keys new worker-0" in text
