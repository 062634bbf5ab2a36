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
from shoestring.checkpoint.snapshot import (
    FileRecord,
    Snapshot,
    commit,
    newest,
    prune,
    read_manifest,
    step_folder,
)
from shoestring.errors import SnapshotError
from tests.unit.checkpoint.checkpoints import (
    FILES,
    assert_holds,
    falls_back,
    make_manifest,
    write_checkpoint,
    write_file,
    write_files,
)


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
from checkpoints import write_checkpoint

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
from checkpoints import make_manifest, write_files
from shoestring.errors import SnapshotError
from shoestring.checkpoint.snapshot import commit, discard

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
