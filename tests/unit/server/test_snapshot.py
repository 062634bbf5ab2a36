"""A checkpoint is complete and undamaged, or it is passed over for the one before it."""

import hashlib
import json
import os
import shutil
import subprocess
import sys

import msgspec
import numpy as np
import pytest

import shoestring
from shoestring.errors import SnapshotError, UsageError
from shoestring.server import snapshot as module
from shoestring.server.snapshot import (
    FileRecord,
    Manifest,
    Snapshot,
    TensorFileWriter,
    commit,
    discard,
    newest,
    prune,
    read_manifest,
    step_folder,
)

PARTS = 4
FILES = ["shard-0.safetensors", "shard-1.safetensors", "worker-0.safetensors"]


def make_tensors(step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    tensors = {}
    for part in range(PARTS):
        size = 1500 + 100 * part
        tensors[f"part.{part:05d}.params"] = rng.standard_normal(size, np.float32)
        tensors[f"part.{part:05d}.state.exp_avg"] = rng.standard_normal(size, np.float32)
        tensors[f"part.{part:05d}.kept"] = rng.standard_normal(size, np.float32)
    return tensors


def write_file(path, tensors, facts=None) -> FileRecord:
    with TensorFileWriter(path, {name: (x.dtype, x.shape) for name, x in tensors.items()}) as writer:
        for name, values in tensors.items():
            writer.write(name, values)
        return writer.finish(facts)


def write_files(folder, step: int, shards: int = 2) -> list[FileRecord]:
    """Deal the parts out to the shards; the worker's file holds a tensor of its own."""
    tensors = make_tensors(step)
    records = []
    for shard in range(shards):
        mine = {name: x for name, x in tensors.items() if int(name.split(".")[1]) % shards == shard}
        records.append(write_file(folder / f"shard-{shard}.safetensors", mine, {"ledger": {"0": [1, step]}}))
    worker = {"worker.0.kept": np.full(1500, step, np.float32)}
    return [*records, write_file(folder / "worker-0.safetensors", worker)]


def make_manifest(step: int, files: list[FileRecord], /, **changes) -> Manifest:
    given = {"step": step, "workers": 1, "shards": 2, "facts": {"codec": "dct"}, "files": files}
    return Manifest(**given | changes)


def write_checkpoint(root, step: int, shards: int = 2):
    folder = step_folder(root, step)
    commit(folder, make_manifest(step, write_files(folder, step, shards), shards=shards))
    return folder


def assert_holds(snapshot: Snapshot | None, step: int) -> None:
    assert snapshot is not None
    assert snapshot.manifest.step == step
    want = make_tensors(step) | {"worker.0.kept": np.full(1500, step, np.float32)}
    assert snapshot.names().keys() == want.keys()
    for name, values in want.items():
        found = snapshot.read(name)
        assert snapshot.spec(name) == (found.dtype.name, found.shape) == (values.dtype.name, values.shape)
        assert found.tobytes() == values.tobytes()


def falls_back(root, to: int, *named) -> None:
    """The newest checkpoint is passed over, with one error that names the file."""
    found, passed_over = newest(root)
    assert_holds(found, to)
    assert len(passed_over) == 1
    assert any(f"`{path}`" in passed_over[0].message for path in named), passed_over


@pytest.fixture
def root(tmp_path):
    """Two complete checkpoints, of steps 100 and 200."""
    root = tmp_path / "checkpoints"
    write_checkpoint(root, 100)
    write_checkpoint(root, 200)
    return root


def test_the_newest_is_found_and_holds_what_was_written(root):
    found, passed_over = newest(root)
    assert_holds(found, 200)
    assert passed_over == []
    assert sorted(os.listdir(found.folder)) == ["manifest.json", *FILES]
    assert found.folder == root / "step-000000200"
    assert found.manifest.shoestring == shoestring.__version__
    assert found.manifest.facts == {"codec": "dct"}
    assert [file.name for file in found.manifest.files] == FILES
    assert found.manifest.files[1].facts == {"ledger": {"0": [1, 200]}}


def test_the_manifest_is_plain_json_with_its_digest_at_the_end(root):
    text = (root / "step-000000200" / "manifest.json").read_bytes()
    data = json.loads(text)
    assert list(data) == ["format", "shoestring", "step", "workers", "shards", "facts", "files", "digest"]
    assert data["digest"] == hashlib.sha256(text[: text.rindex(b',"digest"')]).hexdigest()
    assert read_manifest(root / "step-000000200") == make_manifest(
        200, msgspec.convert(data["files"], list[FileRecord])
    )


@pytest.mark.parametrize("shards", [1, 3, 5])
def test_parts_are_found_whatever_the_number_of_shards(tmp_path, shards):
    write_checkpoint(tmp_path, 7, shards)
    found, _ = newest(tmp_path)
    assert_holds(found, 7)
    assert found.names()["part.00003.params"] == f"shard-{3 % shards}.safetensors"


def test_a_tensor_that_is_not_there(root):
    found, _ = newest(root)
    assert found.has("part.00000.kept")
    assert not found.has("part.00099.kept")
    for act in (found.read, found.spec):
        with pytest.raises(SnapshotError, match=r"step-000000200` has no tensor `part.00099.kept`"):
            act("part.00099.kept")


def test_no_checkpoint_at_all(tmp_path):
    assert newest(tmp_path / "missing") == (None, [])
    assert prune(tmp_path / "missing", 1) == []
    assert newest(tmp_path) == (None, [])
    with pytest.raises(SnapshotError, match=r"nothing/manifest.json` is missing"):
        Snapshot(tmp_path / "nothing")


def test_a_root_that_is_no_folder_is_refused(tmp_path):
    path = tmp_path / "file"
    path.write_text("")
    with pytest.raises(SnapshotError, match=f"`{path}` cannot be read"):
        newest(path)


def test_steps_are_compared_as_numbers(tmp_path):
    for step in (999_999_999, 1_000_000_000, 5):
        write_checkpoint(tmp_path, step)
    assert newest(tmp_path)[0].manifest.step == 1_000_000_000


def test_what_has_another_name_is_not_looked_at(root):
    for name in ("best", "step-300", "step-0000000300", "step-000000300.old", "step-00000030x"):
        shutil.copytree(root / "step-000000200", root / name)
    (root / "step-000000400").write_text("no folder")
    (root / "step-000000500").symlink_to("step-000000100")
    found, passed_over = newest(root)
    assert_holds(found, 200)
    assert passed_over == []
    assert_holds(Snapshot(root / "best"), 200)  # a copy under a name of its own can be opened


CRASHES = """
import os, shutil, sys
from pathlib import Path

sys.path.insert(0, sys.argv[1])
from test_snapshot import write_checkpoint

CALLS = {name: getattr(os, name) for name in ("mkdir", "open", "pwrite", "fsync", "close", "replace")}

def crash(point):
    count = 0
    def patch(name):
        def call(*args, **options):
            nonlocal count
            count += 1
            if count == point:
                if name == "pwrite":  # half of the data is written
                    CALLS["pwrite"](args[0], args[1][: len(args[1]) // 2], args[2])
                os._exit(9)
            return CALLS[name](*args, **options)
        setattr(os, name, call)
    for name in CALLS:
        patch(name)

code, point = 9, 0
while code == 9:
    point += 1
    shutil.copytree("start", f"{point}")
    child = os.fork()
    if child == 0:
        crash(point)
        write_checkpoint(Path(f"{point}"), 200)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(point, code)
"""


def test_a_crash_at_any_step_leaves_the_newest_complete_one(tmp_path):
    """A process dies at every call that changes the disk: where one call has ended, the next is to begin."""
    write_checkpoint(tmp_path / "start", 100)
    program = [sys.executable, "-c", CRASHES, os.path.dirname(__file__)]
    done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    points, code = map(int, done.stdout.split())
    assert code == 0  # in the end nothing was left to crash at
    assert points > 4 * 8  # four files, and each is more than eight calls
    steps = []
    for point in range(1, points + 1):
        root = tmp_path / str(point)
        found, passed_over = newest(root)
        steps.append(found.manifest.step)
        assert_holds(found, steps[-1])
        is_begun = (root / "step-000000200").exists()
        assert len(passed_over) == (1 if steps[-1] == 100 and is_begun else 0)
        # The run that takes over writes the same step again, and what the dead one left goes away.
        write_checkpoint(root, 200)
        prune(root, 1)
        assert_holds(newest(root)[0], 200)
        assert os.listdir(root) == ["step-000000200"]
        assert sorted(os.listdir(root / "step-000000200")) == ["manifest.json", *FILES]
    assert sorted(set(steps)) == [100, 200]
    assert steps == sorted(steps)


def test_an_attempt_without_a_commit_is_passed_over(root):
    write_files(step_folder(root, 300), 300)
    falls_back(root, 200, root / "step-000000300" / "manifest.json")


def flip(path, at: int, bit: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        octet = file.read(1)[0]
        file.seek(at)
        file.write(bytes([octet ^ 1 << bit]))


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"facts": {"a": (1, 2)}}, "facts are not JSON data"),
        ({"facts": {"a": float("nan")}}, "facts are not JSON data"),
        ({"facts": {1: "a"}}, "facts"),
        ({"facts": {"a": {1: "a"}}}, "facts are not JSON data"),
        ({"facts": {"a": b"bytes"}}, "facts are not JSON data"),
        ({"facts": {"a": np.float32(1)}}, "float32"),
        ({"facts": {"a": object()}}, "object"),
        ({"facts": {"a": "x" * (16 << 20)}}, "the most is 16777216"),
        ({"step": 201}, "it is of step 201, its folder is `step-000000200`"),
        ({"step": -1}, ">= 0"),
        ({"format": 2}, "has format 2"),
    ],
)
def test_a_manifest_that_could_not_be_read_is_not_committed(tmp_path, change, message):
    folder = step_folder(tmp_path, 200)
    files = write_files(folder, 200)
    with pytest.raises(SnapshotError, match="manifest.json") as caught:
        commit(folder, make_manifest(200, files, **change))
    assert message in caught.value.message
    assert sorted(os.listdir(folder)) == FILES


def test_facts_come_back_as_they_were(tmp_path):
    facts = {"a": [1, 2.5, None, True, "ü\n", {"b": 1e-300, "c": 0.1, "d": -(2**63), "e": 2**64 - 1}], "": {}}
    folder = step_folder(tmp_path, 1)
    commit(folder, make_manifest(1, [write_file(folder / FILES[0], {}, facts)], facts=facts))
    assert Snapshot(folder).manifest.facts == facts
    assert Snapshot(folder).manifest.files[0].facts == facts


def test_after_a_commit_all_names_are_on_disk(tmp_path, monkeypatch):
    folder = step_folder(tmp_path, 200)
    files = write_files(folder, 200)
    synced = []
    real = os.fsync

    def spy(descriptor):
        synced.append((os.readlink(f"/proc/self/fd/{descriptor}"), (folder / "manifest.json").exists()))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", spy)
    commit(folder, make_manifest(200, files))
    (temporary, is_named), *rest = synced
    assert temporary.startswith(f"{folder}/manifest.json.")
    assert not is_named
    assert rest == [(str(folder), True), (str(tmp_path), True)]


def test_a_missing_or_wrong_file_is_not_committed(tmp_path):
    folder = step_folder(tmp_path, 200)
    files = write_files(folder, 200)
    os.truncate(folder / FILES[1], 100)
    with pytest.raises(SnapshotError, match=f"`{folder / FILES[1]}` has 100 bytes, expected {files[1].size}"):
        commit(folder, make_manifest(200, files))
    (folder / FILES[1]).unlink()
    with pytest.raises(SnapshotError, match=f"`{folder / FILES[1]}` is missing"):
        commit(folder, make_manifest(200, files))
    assert sorted(os.listdir(folder)) == [FILES[0], FILES[2]]


def test_a_tensor_in_two_files_is_not_committed(tmp_path):
    folder = step_folder(tmp_path, 200)
    files = [write_file(folder / name, {"part.00000.kept": np.zeros(3)}) for name in FILES]
    with pytest.raises(SnapshotError, match=r"tensor `part.00000.kept` is there twice"):
        commit(folder, make_manifest(200, files))


FULL_DISK = """
import os, resource, sys
from pathlib import Path

sys.path.insert(0, sys.argv[1])
from test_snapshot import SnapshotError, commit, discard, make_manifest, write_files

folder = Path(sys.argv[2])
files = write_files(folder, 300)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
try:
    commit(folder, make_manifest(300, files))
except SnapshotError as error:
    print(error)
    print(sorted(os.listdir(folder)))
discard(folder)
"""


def test_a_full_disk_at_the_commit_leaves_the_previous_checkpoint(root):
    folder = step_folder(root, 300)
    program = [sys.executable, "-c", FULL_DISK, os.path.dirname(__file__), folder]
    done = subprocess.run(program, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"`{folder}/manifest.json` cannot be written: File too large "
        "(hint: free some space, keep fewer checkpoints, or write them to a larger disk)",
        str(FILES),
    ]
    assert sorted(os.listdir(root)) == ["step-000000100", "step-000000200"]
    assert_holds(newest(root)[0], 200)


def test_prune_keeps_the_newest_complete_ones(root):
    write_checkpoint(root, 300)
    assert prune(root, 3) == []
    assert prune(root, 2) == [root / "step-000000100"]
    assert prune(root, 1) == [root / "step-000000200"]
    assert prune(root, 1) == []
    assert os.listdir(root) == ["step-000000300"]
    assert_holds(newest(root)[0], 300)


@pytest.mark.parametrize("keep", [0, -1])
def test_prune_never_removes_all(root, keep):
    with pytest.raises(UsageError, match=f"cannot keep {keep} checkpoints"):
        prune(root, keep)
    assert_holds(newest(root)[0], 200)


def test_prune_removes_what_abandoned_attempts_left(root):
    left = root / "step-000000200" / "shard-0.safetensors.0123abcd.partial"
    left.write_bytes(b"half")
    older, newer = step_folder(root, 150), step_folder(root, 300)
    for folder in (older, newer):
        write_files(folder, 1)
        (folder / "worker-0.safetensors.0123abcd.partial").write_bytes(b"half")
    assert prune(root, 5) == [left, older]
    # The newer one may still be being written.
    assert sorted(os.listdir(root)) == ["step-000000100", "step-000000200", "step-000000300"]
    assert len(os.listdir(newer)) == 4
    assert_holds(newest(root)[0], 200)


def test_prune_without_a_complete_checkpoint_removes_nothing(tmp_path):
    write_files(step_folder(tmp_path, 1), 1)
    write_files(step_folder(tmp_path, 2), 2)
    assert prune(tmp_path, 1) == []
    assert len(os.listdir(tmp_path)) == 2


def test_prune_does_not_count_or_remove_broken_ones(root):
    """One that cannot be opened must not push out one that can."""
    for step in (300, 150):
        folder = write_checkpoint(root, step)
        (folder / "manifest.json").write_text('{"format":2,"shoestring":"9.8.7"}')
    os.truncate(write_checkpoint(root, 400) / FILES[0], 10)
    assert prune(root, 1) == [root / "step-000000100"]
    assert_holds(newest(root)[0], 200)
    assert len(os.listdir(root)) == 4


def test_prune_leaves_what_it_did_not_write(root, tmp_path):
    mine = root / "step-000000100" / "notes.txt"
    mine.write_text("the good one")
    outside = tmp_path / "outside.safetensors"
    outside.write_text("not ours")
    (root / "step-000000100" / "link.safetensors").symlink_to(outside)
    (root / "step-000000050").symlink_to(tmp_path, target_is_directory=True)
    assert prune(root, 1) == [root / "step-000000100"]
    assert os.listdir(root / "step-000000100") == ["notes.txt"]
    assert outside.read_text() == "not ours"
    assert (root / "step-000000050").is_symlink()


def test_what_is_half_removed_does_not_look_complete(root, monkeypatch):
    real, calls = os.unlink, []

    def refuse_the_second(path, **options):
        calls.append(path)
        if len(calls) > 1:
            raise PermissionError(1, "Operation not permitted", str(path))
        real(path, **options)

    monkeypatch.setattr(os, "unlink", refuse_the_second)
    with pytest.raises(
        SnapshotError, match="step-000000100/shard-0.safetensors` cannot be removed"
    ) as caught:
        prune(root, 1)
    assert "right to use that folder" in caught.value.hint
    assert calls[0] == root / "step-000000100" / "manifest.json"
    assert sorted(os.listdir(root / "step-000000100")) == FILES
    assert_holds(newest(root)[0], 200)


def test_discard_removes_an_attempt_and_never_a_checkpoint(root, tmp_path):
    attempt = step_folder(root, 300)
    write_files(attempt, 300)
    for folder in (attempt, attempt, root / "step-000000200"):
        discard(folder)
    assert sorted(os.listdir(root)) == ["step-000000100", "step-000000200"]
    assert_holds(newest(root)[0], 200)
    model = tmp_path / "model"
    write_file(model / "weights.safetensors", {"x": np.zeros(3)})
    discard(model)  # no step's folder
    assert os.listdir(model) == ["weights.safetensors"]


def test_a_step_can_be_written_again(root):
    """A run restored from an older checkpoint comes to the same step once more."""
    flip(root / "step-000000200" / FILES[0], 5000, 0)
    assert_holds(newest(root)[0], 100)
    write_checkpoint(root, 200)
    assert newest(root)[1] == []
    assert_holds(newest(root)[0], 200)


RECORDED_SHARD = (
    b'\xb8\0\0\0\0\0\0\0{"part.00000.params":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
    b'"part.00000.kept":{"dtype":"U8","shape":[3],"data_offsets":[8,11]}}'
    + b" " * 47
    + b"\0\0\x80?\0\0 \xc0\x01\x02\x03"
)
RECORDED_MANIFEST = (
    b'{"format":1,"shoestring":"0.1.0","step":7,"workers":1,"shards":1,"facts":{},"files":['
    b'{"name":"shard-0.safetensors","size":203,'
    b'"header":"fd738452aad033a3ac83a978617e8c3ebd07d89fe8f73f17ce668f482fb4de06","tensors":['
    b'{"name":"part.00000.kept",'
    b'"digest":"039058c6f2c0cb492c533b0a4d14ef77cc0f78abccced5287d84a1a2011cfb81"},'
    b'{"name":"part.00000.params",'
    b'"digest":"48943f7a0ea247f8e3c9386d0c5822fe181d323a9289980426638cc4e72a43e1"}],'
    b'"facts":{"ledger":{"0":[1,7]}}}],'
    b'"digest":"7e4fa646deca836428f610a76380820141521262ac718e78f3e76ae3b8c43a6e"}\n'
)


def test_the_recorded_checkpoint_of_format_1_is_read_and_written_the_same(tmp_path):
    tensors = {
        "part.00000.kept": np.array([1, 2, 3], np.uint8),
        "part.00000.params": np.array([1, -2.5], np.float32),
    }
    folder = step_folder(tmp_path / "recorded", 7)
    folder.mkdir(parents=True)
    (folder / "shard-0.safetensors").write_bytes(RECORDED_SHARD)
    (folder / "manifest.json").write_bytes(RECORDED_MANIFEST)
    found, _ = newest(tmp_path / "recorded")
    for name, want in tensors.items():
        np.testing.assert_array_equal(found.read(name), want, strict=True)
    again = step_folder(tmp_path / "again", 7)
    files = [write_file(again / "shard-0.safetensors", tensors, {"ledger": {"0": [1, 7]}})]
    commit(again, make_manifest(7, files, shards=1, facts={}, shoestring="0.1.0"))
    assert (again / "shard-0.safetensors").read_bytes() == RECORDED_SHARD
    assert (again / "manifest.json").read_bytes() == RECORDED_MANIFEST
