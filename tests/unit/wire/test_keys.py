"""Key files: written once, private, and read as nothing but keys."""

import os
import stat

import pytest
import zmq
from zmq.utils import z85

from shoestring.errors import KeyFileError
from shoestring.wire import keys


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("name", ["shard", "worker-0", "node1.lan_7", "0", "x" * 64])
def test_new_keys_read_back(tmp_path, name):
    folder = tmp_path / "made" / "keys"
    pair = keys.new(name, folder)
    assert len(z85.decode(pair.public)) == len(z85.decode(pair.secret)) == 32
    assert zmq.curve_public(pair.secret) == pair.public
    assert keys.load_pair(folder / f"{name}.secret") == pair
    assert keys.load_public(folder / f"{name}.public") == pair.public
    assert sorted(file.name for file in folder.iterdir()) == [f"{name}.public", f"{name}.secret"]


def test_the_format_is_this(tmp_path):
    pair = keys.new("shard", tmp_path)
    assert (tmp_path / "shard.secret").read_bytes() == (
        b"shoestring secret key, format 1; keep it to yourself\n"
        b"public: " + pair.public + b"\nsecret: " + pair.secret + b"\n"
    )
    assert (tmp_path / "shard.public").read_bytes() == (
        b"shoestring public key, format 1\npublic: " + pair.public + b"\n"
    )


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_only_the_owner_can_read_a_secret_whatever_the_umask(tmp_path, umask):
    before = os.umask(umask)
    try:
        keys.new("shard", tmp_path / "keys")
    finally:
        os.umask(before)
    assert mode_of(tmp_path / "keys") == 0o700
    assert mode_of(tmp_path / "keys/shard.secret") == 0o600
    assert mode_of(tmp_path / "keys/shard.public") == 0o644 & ~umask


def test_two_keys_differ(tmp_path):
    first, second = keys.new("a", tmp_path), keys.new("b", tmp_path)
    assert len({first.public, first.secret, second.public, second.secret}) == 4


@pytest.mark.parametrize("kind", ["secret", "public"])
def test_nothing_is_overwritten(tmp_path, kind):
    file = tmp_path / f"worker-3.{kind}"
    file.write_text("precious")
    with pytest.raises(KeyFileError) as caught:
        keys.new("worker-3", tmp_path)
    assert caught.value.message == f"`{file}` already exists"
    assert caught.value.hint == "choose another name, or remove it to replace the key of `worker-3`"
    assert [(each, each.read_text()) for each in tmp_path.iterdir()] == [(file, "precious")]


def test_a_link_is_not_followed_when_writing(tmp_path):
    (tmp_path / "shard.secret").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(KeyFileError, match="already exists"):
        keys.new("shard", tmp_path)
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../x",
        "a/b",
        "/x",
        ".hidden",
        "-x",
        "a b",
        "a\n",
        "ä",
        "x" * 65,
        "x.secret",
        "x.public",
    ],
)
def test_names_are_plain_file_names(tmp_path, name):
    for use in (keys.new, keys.secret_file, keys.public_file):
        with pytest.raises(KeyFileError, match="is no name for a key"):
            use(name, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "keys"):
        with pytest.raises(KeyFileError, match=f"folder `{folder}` cannot be made") as caught:
            keys.new("shard", folder)
        assert "--dir" in caught.value.hint


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o601])
def test_a_secret_that_others_can_reach_is_refused(tmp_path, mode):
    keys.new("shard", tmp_path)
    file = tmp_path / "shard.secret"
    file.chmod(mode)
    with pytest.raises(KeyFileError, match=f"its mode {mode:o} lets others in") as caught:
        keys.load_pair(file)
    assert f"chmod 600 {file}" in caught.value.hint
    file.chmod(0o400)
    keys.load_pair(file)


def test_missing_files_are_named(tmp_path):
    for load in (keys.load_pair, keys.load_public, keys.load_allowed):
        with pytest.raises(
            KeyFileError, match=f"`{tmp_path}/nothing` cannot be read: No such file"
        ) as caught:
            load(tmp_path / "nothing")
        assert "shoestring keys new" in caught.value.hint


# Texts that are almost a secret file: of the text itself, its two keys, and another public key.
DAMAGED = {
    "empty": lambda text, public, secret, other: b"",
    "cut off": lambda text, public, secret, other: text[:-1],
    "a line too many": lambda text, public, secret, other: text + b"\n",
    "no title": lambda text, public, secret, other: text.partition(b"\n")[2],
    "later format": lambda text, public, secret, other: text.replace(b"format 1", b"format 2"),
    "windows lines": lambda text, public, secret, other: text.replace(b"\n", b"\r\n"),
    "other field": lambda text, public, secret, other: text.replace(b"secret:", b"public:"),
    "short key": lambda text, public, secret, other: text.replace(secret, secret[:-1]),
    "long key": lambda text, public, secret, other: text.replace(secret, secret + b"00000"),
    "not Z85": lambda text, public, secret, other: text.replace(secret, b'"' + secret[1:]),
    "not ASCII": lambda text, public, secret, other: text.replace(secret, b"\xff" + secret[1:]),
    "past 32 bits": lambda text, public, secret, other: text.replace(secret, b"#####" + secret[5:]),
    "keys of two pairs": lambda text, public, secret, other: text.replace(public, other),
    "endless": lambda text, public, secret, other: text + b"x" * 10_000_000,
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_damaged_files_are_refused_and_not_repeated(tmp_path, kind):
    pair, other = keys.new("shard", tmp_path), keys.new("other", tmp_path)
    file = tmp_path / "shard.secret"
    file.write_bytes(DAMAGED[kind](file.read_bytes(), pair.public, pair.secret, other.public))
    with pytest.raises(KeyFileError, match=f"`{file}` is no key file") as caught:
        keys.load_pair(file)
    assert pair.secret[5:-1].decode() not in str(caught.value)


def test_a_public_file_is_no_secret_file_nor_the_other_way_round(tmp_path):
    keys.new("shard", tmp_path)
    (tmp_path / "shard.public").chmod(0o600)
    with pytest.raises(KeyFileError, match="is no key file"):
        keys.load_pair(tmp_path / "shard.public")
    with pytest.raises(KeyFileError, match="is no key file"):
        keys.load_public(tmp_path / "shard.secret")


@pytest.mark.timeout(20)
def test_what_is_no_plain_file_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(KeyFileError, match="it is not a plain file"):
        keys.load_pair(tmp_path / "pipe")
    with pytest.raises(KeyFileError, match="it is not a plain file"):
        keys.load_public(tmp_path)


def test_an_allow_list_is_a_folder_or_a_file(tmp_path):
    public = {name: keys.new(name, tmp_path).public for name in ("worker-1", "worker-0")}
    (tmp_path / "notes.txt").write_text("not a key")
    assert keys.load_allowed(tmp_path) == frozenset(public.values())
    assert keys.load_allowed(tmp_path / "worker-1.public") == frozenset({public["worker-1"]})
    assert list(keys.load_named(tmp_path).items()) == sorted(public.items())


def test_one_damaged_file_refuses_the_whole_allow_list(tmp_path):
    keys.new("worker-0", tmp_path)
    (tmp_path / "worker-1.public").write_text("nonsense")
    with pytest.raises(KeyFileError, match=r"worker-1.public` is no key file"):
        keys.load_allowed(tmp_path)


def test_a_run_reads_its_keys_from_one_folder(tmp_path):
    pairs = {name: keys.new(name, tmp_path) for name in ("shard", "worker-0", "worker-1")}
    shard = keys.keys_from_folder(tmp_path, "shard")
    assert shard.pair == pairs["shard"]
    assert shard.allowed == {pairs["worker-0"].public, pairs["worker-1"].public}
    for name in ("worker-0", "worker-1"):
        worker = keys.keys_from_folder(tmp_path, "worker", name)
        assert (worker.pair, worker.shard_public) == (pairs[name], pairs["shard"].public)


def test_each_host_needs_no_more_than_its_part(tmp_path):
    for name in ("shard", "worker-0"):
        keys.new(name, tmp_path)
    (tmp_path / "shard.secret").rename(tmp_path / "away")
    keys.keys_from_folder(tmp_path, "worker", "worker-0")
    (tmp_path / "away").rename(tmp_path / "shard.secret")
    (tmp_path / "worker-0.secret").unlink()
    (tmp_path / "shard.public").unlink()
    keys.keys_from_folder(tmp_path, "shard")


def test_a_shard_that_nobody_could_join_is_refused(tmp_path):
    keys.new("shard", tmp_path)
    with pytest.raises(KeyFileError, match="holds no worker's public key") as caught:
        keys.keys_from_folder(tmp_path, "shard")
    assert "shoestring keys new worker-0" in caught.value.hint


def test_secrets_are_not_shown(tmp_path):
    for name in ("shard", "worker-0"):
        keys.new(name, tmp_path)
    for bundle in (
        keys.keys_from_folder(tmp_path, "shard"),
        keys.keys_from_folder(tmp_path, "worker", "worker-0"),
    ):
        for text in (repr(bundle), str(bundle), repr(bundle.pair)):
            assert bundle.pair.secret.decode() not in text
            assert repr(bundle.pair.secret)[2:-1] not in text
            assert repr(bundle.pair.public)[2:-1] in text
