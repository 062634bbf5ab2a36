"""A checkpoint that was damaged, swapped or forged is refused, and the file is named."""

import hashlib
import json
import os

import numpy as np
import pytest

import shoestring
from shoestring.checkpoint import snapshot as module
from shoestring.checkpoint.snapshot import (
    Snapshot,
    commit,
    newest,
    step_folder,
)
from shoestring.errors import SnapshotError
from tests.unit.checkpoint.checkpoints import (
    FILES,
    assert_holds,
    falls_back,
    flip,
    make_manifest,
    write_checkpoint,
    write_file,
)


@pytest.mark.parametrize("name", ["manifest.json", *FILES])
def test_a_flipped_bit_in_every_4_kib_is_found(root, name):
    path = root / "step-000000200" / name
    size = path.stat().st_size
    rng = np.random.default_rng(0)
    places = [
        0,
        size - 1,
        *(min(size - 1, start + int(rng.integers(4096))) for start in range(0, size, 4096)),
    ]
    for place in places:
        bit = int(rng.integers(8))
        flip(path, place, bit)
        falls_back(root, 100, path)
        flip(path, place, bit)
    assert_holds(newest(root)[0], 200)


def test_a_flipped_bit_in_any_byte_of_a_manifest_or_header_is_found(root):
    folder = root / "step-000000200"
    manifest, shard = folder / "manifest.json", folder / FILES[0]
    for place in range(manifest.stat().st_size):
        flip(manifest, place, place % 8)
        with pytest.raises(SnapshotError, match=f"`{manifest}`"):
            Snapshot(folder)
        flip(manifest, place, place % 8)
    opened = Snapshot(folder)
    header_bytes = 8 + int.from_bytes(shard.read_bytes()[:8], "little")
    for place in range(header_bytes):
        flip(shard, place, place % 8)
        with pytest.raises(SnapshotError, match=f"`{shard}`"):
            opened.read("part.00000.params")
        flip(shard, place, place % 8)
    assert_holds(opened, 200)


@pytest.mark.parametrize("name", ["manifest.json", *FILES])
def test_a_truncated_file_is_found(root, name):
    path = root / "step-000000200" / name
    whole = path.read_bytes()
    for size in (len(whole) - 1, len(whole) - 78, len(whole) // 2, 4096, 100, 8, 7, 1, 0):
        path.write_bytes(whole[: min(size, len(whole) - 1)])
        falls_back(root, 100, path)
    path.write_bytes(whole + b"\n")
    falls_back(root, 100, path)
    path.unlink()
    falls_back(root, 100, path)


def exchange(one, other) -> None:
    one.rename(one.with_name("aside"))
    other.rename(one)
    one.with_name("aside").rename(other)


@pytest.mark.parametrize("name", FILES)
def test_files_swapped_between_checkpoints_are_found(root, name):
    old, new = root / "step-000000100" / name, root / "step-000000200" / name
    assert old.stat().st_size == new.stat().st_size
    exchange(old, new)
    found, passed_over = newest(root)
    assert found is None
    assert [error.message.split("`")[1] for error in passed_over] == [str(new), str(old)]
    unverified, _ = newest(root, verify=False)  # looks at sizes alone, but reads nothing wrong
    for tensor, home in unverified.names().items():
        if home == name:
            with pytest.raises(SnapshotError, match=f"`{new}` has tensor `{tensor}` with a SHA-256"):
                unverified.read(tensor)


def test_files_swapped_within_a_checkpoint_are_found(tmp_path):
    write_checkpoint(tmp_path, 100)
    folder = step_folder(tmp_path, 200)
    files = [
        write_file(folder / f"shard-{i}.safetensors", {f"part.0000{i}.params": np.zeros(9)}) for i in range(2)
    ]
    commit(folder, make_manifest(200, files))
    assert newest(tmp_path)[0].manifest.step == 200
    exchange(folder / FILES[0], folder / FILES[1])
    falls_back(tmp_path, 100, folder / FILES[0])


def test_swapped_manifests_and_folders_are_found(root):
    old, new = root / "step-000000100", root / "step-000000200"
    exchange(old / "manifest.json", new / "manifest.json")
    assert newest(root)[0] is None
    exchange(old / "manifest.json", new / "manifest.json")
    exchange(old, new)
    found, passed_over = newest(root)
    assert found is None
    assert "it is of step 100, its folder is `step-000000200`" in passed_over[0].message


def seal(data: dict) -> bytes:
    """A manifest as someone writes it who knows the format."""
    text = json.dumps(data, separators=(",", ":")).encode()[:-1]
    return text + b',"digest":"%s"}\n' % hashlib.sha256(text).hexdigest().encode()


def edit(folder, change, *, is_sealed: bool) -> None:
    path = folder / "manifest.json"
    text = path.read_bytes()
    data = json.loads(text)
    digest = data.pop("digest")
    assert seal(data) == text
    change(data)
    path.write_bytes(seal(data) if is_sealed else json.dumps(data | {"digest": digest}).encode())


def rename(name: str):
    def change(data):
        data["files"][0]["name"] = name

    return change


SEALED_EDITS = {
    "no files": (lambda data: data.pop("files"), "missing required field"),
    "unknown field": (lambda data: data.update(run="me"), "unknown field"),
    "step negative": (lambda data: data.update(step=-1), ">= 0"),
    "step of text": (lambda data: data.update(step="200"), "int"),
    "other step": (lambda data: data.update(step=300), "it is of step 300"),
    "parent folder": (rename("../step-000000100/shard-0.safetensors"), "regex"),
    "absolute path": (rename("/etc/passwd"), "regex"),
    "dots": (rename(".."), "regex"),
    "hidden": (rename(".safetensors"), "regex"),
    "other folder": (rename("a/shard-0.safetensors"), "regex"),
    "backslash": (rename("a\\shard-0.safetensors"), "regex"),
    "NUL": (rename("shard-0\0.safetensors"), "regex"),
    "line end": (rename("shard-0.safetensors\n"), "regex"),
    "manifest itself": (rename("manifest.json"), "regex"),
    "file twice": (rename("shard-1.safetensors"), "file `shard-1.safetensors` is there twice"),
    "tensor twice": (
        lambda data: data["files"][0]["tensors"].extend(data["files"][1]["tensors"]),
        "tensor `part.00001.params` is there twice",
    ),
    "digest of another length": (
        lambda data: data["files"][0]["tensors"][0].update(digest="00"),
        "regex",
    ),
    "escape sequence as name": (lambda data: data["files"][0]["tensors"][0].update(name="\x1b[2J"), "regex"),
}


@pytest.mark.parametrize(("change", "message"), SEALED_EDITS.values(), ids=SEALED_EDITS)
def test_a_manifest_edited_by_one_who_knows_the_format_is_refused(root, change, message):
    folder = root / "step-000000200"
    edit(folder, change, is_sealed=True)
    with pytest.raises(SnapshotError) as caught:
        Snapshot(folder)
    assert caught.value.message.startswith(f"`{folder}/manifest.json` is not a whole manifest: ")
    assert message in caught.value.message
    falls_back(root, 100, folder / "manifest.json")


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.update(step=201),
        lambda data: data["facts"].update(codec="int8"),
        lambda data: data["files"][0]["facts"]["ledger"].update({"0": [1, 199]}),
        lambda data: data["files"].pop(),
        lambda data: None,  # only the spaces differ
    ],
)
def test_an_edited_manifest_is_refused(root, change):
    folder = root / "step-000000200"
    edit(folder, change, is_sealed=False)
    with pytest.raises(SnapshotError, match=f"`{folder}/manifest.json` .*SHA-256"):
        Snapshot(folder)
    falls_back(root, 100, folder / "manifest.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda record: record.update(header="0" * 64), "has a header whose SHA-256"),
        (lambda record: record["tensors"][0].update(digest="0" * 64), "`part.00000.params` with a SHA-256"),
        (lambda record: record["tensors"][0].update(name="part.00000.other"), "does not hold the tensors"),
        (lambda record: record["tensors"].pop(), "does not hold the tensors"),
        (lambda record: record.update(size=record["size"] + 1), "bytes, expected"),
    ],
)
def test_a_file_that_is_not_what_the_manifest_says_is_refused(root, change, message):
    folder = root / "step-000000200"
    edit(folder, lambda data: change(data["files"][0]), is_sealed=True)
    with pytest.raises(SnapshotError, match=f"`{folder / FILES[0]}` .*{message}"):
        Snapshot(folder).verify()
    falls_back(root, 100, folder / FILES[0])


def test_another_format_is_refused_with_both_versions(root):
    folder = root / "step-000000200"
    (folder / "manifest.json").write_text('{"format":2,"shoestring":"9.8.7","parts":{}}')
    with pytest.raises(SnapshotError) as caught:
        Snapshot(folder)
    assert caught.value.message == (
        f"`{folder}/manifest.json` has format 2, written by shoestring 9.8.7; "
        f"this is shoestring {shoestring.__version__}, which reads format 1"
    )
    assert caught.value.hint.startswith("restore it with shoestring 9.8.7, or ")
    falls_back(root, 100, folder / "manifest.json")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"[]",
        b"null",
        b'{"format":2,"shoestring":"\\u001b[2J"}',
        b'{"format":1,"shoestring":"1"}',
        b"[" * 1_000_000,
        b'{"a":' * 1_000_000,
        b'{"format":1,"shoestring":"1","facts":' + b'{"a":' * 1_000_000,
        b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00}\x94\x8c\x01a\x94K\x01s.",
    ],
    ids=[
        "empty",
        "no fields",
        "list",
        "null",
        "escape",
        "no digest",
        "deep",
        "deep objects",
        "deep facts",
        "pickle",
    ],
)
def test_a_hostile_manifest_is_refused(root, content):
    path = root / "step-000000200" / "manifest.json"
    path.write_bytes(content)
    with pytest.raises(SnapshotError, match=f"`{path}` is not a whole manifest"):
        Snapshot(path.parent)
    falls_back(root, 100, path)


def test_facts_that_are_too_deep_are_refused(root):
    path = root / "step-000000200" / "manifest.json"
    text = b'{"format":1,"shoestring":"1","step":200,"workers":1,"shards":1,"files":[],"facts":{"a":'
    text += b"[" * 100_000 + b"]" * 100_000 + b"}"
    path.write_bytes(text + b',"digest":"%s"}\n' % hashlib.sha256(text).hexdigest().encode())
    falls_back(root, 100, path)


def test_a_huge_manifest_is_not_read(root):
    path = root / "step-000000200" / "manifest.json"
    os.truncate(path, module.MAX_JSON_BYTES + 1)
    with pytest.raises(SnapshotError, match=f"`{path}` has {module.MAX_JSON_BYTES + 1} bytes"):
        Snapshot(path.parent)


@pytest.mark.parametrize("name", ["manifest.json", *FILES])
def test_links_are_refused_even_to_the_right_bytes(root, tmp_path, name):
    path = root / "step-000000200" / name
    path.rename(tmp_path / name)
    path.symlink_to(tmp_path / name)
    falls_back(root, 100, path)
    assert (tmp_path / name).exists()
