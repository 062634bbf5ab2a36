"""Who may take how much of the host's memory, and what goes when there is no room."""

import os
import signal
import stat

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoestring.cache import folder as cachefolder
from shoestring.cache.folder import About, CacheFolder, read_size
from shoestring.errors import FleetError, UsageError
from tests.unit.cache.cachejobs import FORK, TIMEOUT_S, make_folder, process

MIB = 1 << 20
LIMIT = 64 * MIB
ONE, TWO, THREE = (About(name, "", 10) for name in ("one", "two", "three"))


def names(folder):
    return [entry.about.name for entry in folder.entries()]


def reserved(folder):
    return {entry.about.name: entry.about.reserved_bytes for entry in folder.entries()}


def test_datasets_are_known_by_name_version_and_length():
    others = [About("one", "", 11), About("one", "2", 10), About("two", "", 10)]
    assert len({about.folder for about in (ONE, *others)}) == 4
    assert ONE.folder == About("one", "", 10, boot="x", reserved_bytes=5).folder


def test_files_are_the_users_alone(tmp_path):
    folder = CacheFolder.default(tmp_path / "cache")
    _, jobs = folder.open(ONE)
    os.close(jobs)
    for path in (folder.path, *folder.path.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


def test_folder_of_others_is_refused(tmp_path):
    (tmp_path / "open").mkdir(0o755)
    (tmp_path / "own").mkdir(0o700)
    (tmp_path / "link").symlink_to(tmp_path / "own")
    (tmp_path / "file").touch(0o600)
    for name in ("open", "link"):
        with pytest.raises(FleetError, match="belongs to you alone"):
            CacheFolder.default(tmp_path / name)
    for name in ("file", "missing/folder"):
        with pytest.raises(FleetError, match="cannot be used"):
            CacheFolder.default(tmp_path / name)


def test_environment_names_the_folder_and_the_limit(tmp_path, monkeypatch):
    monkeypatch.setenv(cachefolder.VARIABLE, str(tmp_path / "named"))
    monkeypatch.setenv(cachefolder.LIMIT_VARIABLE, "3MiB")
    folder = CacheFolder.default()
    assert (folder.path, folder.limit_bytes) == (tmp_path / "named", 3 * MIB)
    monkeypatch.delenv(cachefolder.LIMIT_VARIABLE)
    assert CacheFolder.default().limit_bytes >= cachefolder.LEAST_BYTES


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (2_000_000, 2_000_000),
        ("500MB", 500_000_000),
        ("2 GiB", 2 << 30),
        ("1.5g", 1_500_000_000),
        ("1MiB", MIB),
    ],
)
def test_sizes_are_read(text, size):
    assert read_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-5MB", "5 miles", "1e9", 100, "1KB", "B5"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(UsageError):
        read_size(text)


def test_a_budget_is_granted_in_steps_and_never_exceeded(tmp_path):
    folder = make_folder(tmp_path / "cache", LIMIT)
    folder.open(ONE)
    budget = 10 * MIB
    assert folder.reserve(ONE, 1, budget) == 4 * MIB
    assert folder.reserve(ONE, 4 * MIB, budget) == 4 * MIB
    assert folder.reserve(ONE, 4 * MIB + 1, budget) == 8 * MIB
    assert folder.reserve(ONE, 8 * MIB + 1, budget) == budget
    assert folder.reserve(ONE, budget + 1, budget) == budget


def test_without_a_budget_half_is_left_to_others(tmp_path):
    folder = make_folder(tmp_path / "cache", LIMIT)
    for about in (ONE, TWO, THREE):
        folder.open(about)
        while folder.reserve(about, reserved(folder)[about.name] + 1, None) > reserved(folder)[about.name]:
            pass
        for size in range(MIB, LIMIT, MIB):
            folder.reserve(about, size, None)
    assert reserved(folder) == {"one": 32 * MIB, "two": 16 * MIB, "three": 8 * MIB}


def test_idle_datasets_make_room_the_one_opened_longest_ago_first(tmp_path):
    folder = make_folder(tmp_path / "cache", LIMIT)
    for at, about in enumerate((TWO, ONE)):
        _, jobs = folder.open(about)
        assert folder.reserve(about, 24 * MIB, LIMIT) == 24 * MIB
        os.utime(jobs, (at, at))
        os.close(jobs)
    folder.open(THREE)
    assert folder.reserve(THREE, 16 * MIB, LIMIT) == 16 * MIB
    assert names(folder) == ["one", "three", "two"]
    assert folder.reserve(THREE, 40 * MIB, LIMIT) == 40 * MIB
    assert names(folder) == ["one", "three"]
    assert folder.reserve(THREE, LIMIT, LIMIT) == LIMIT
    assert names(folder) == ["three"]


def hold(folder, about, started):
    folder.open(about)
    started.set()
    signal.pause()


def test_a_dataset_in_use_stays_until_its_process_is_killed(tmp_path):
    folder = make_folder(tmp_path / "cache", LIMIT)
    started = FORK.Event()
    with process(hold, folder, ONE, started) as job:
        assert started.wait(TIMEOUT_S)
        assert folder.reserve(ONE, 40 * MIB, LIMIT) == 40 * MIB
        folder.open(TWO)
        assert not folder.drop(ONE)
        assert folder.reserve(TWO, 40 * MIB, LIMIT) == 0
        assert [entry.is_used for entry in folder.entries()] == [True, True]
        job.kill()
        job.join(TIMEOUT_S)
        assert folder.reserve(TWO, 40 * MIB, LIMIT) == 40 * MIB
    assert names(folder) == ["two"]


def test_drop_removes_what_nobody_uses(tmp_path):
    folder = make_folder(tmp_path / "cache", LIMIT)
    _, jobs = folder.open(ONE)
    os.close(jobs)
    assert folder.drop(ONE)
    assert folder.drop(TWO)
    assert {path.name for path in folder.path.iterdir()} == {"lock"}


def test_what_a_killed_process_left_behind_is_swept(tmp_path):
    folder = make_folder(tmp_path / "cache", LIMIT)
    (folder.path / ".half").mkdir()
    (folder.path / ".half" / "data.mdb").write_bytes(bytes(100))
    assert folder.entries() == []
    assert not (folder.path / ".half").exists()


@pytest.mark.parametrize("damage", ["other boot", "cut off"])
def test_a_dataset_from_before_the_machine_stopped_is_begun_anew(tmp_path, damage):
    folder = make_folder(tmp_path / "cache", LIMIT)
    about, jobs = folder.open(ONE)
    folder.reserve(ONE, 1, LIMIT)
    os.close(jobs)
    file = folder.path_of(ONE) / "about.json"
    other = msgspec.json.encode(msgspec.structs.replace(about, boot="another"))
    file.write_bytes(other if damage == "other boot" else other[:20])
    folder.open(ONE)
    assert reserved(folder) == {"one": 0}


def test_a_folder_that_stays_locked_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(cachefolder, "_LOCK_TIMEOUT_S", 0.01)
    folder = make_folder(tmp_path / "cache", LIMIT)
    with folder._lock(), pytest.raises(FleetError, match="has been held"):
        folder.entries()
    assert folder.entries() == []


@given(
    st.lists(
        st.tuples(
            st.sampled_from([ONE, TWO, THREE]),
            st.integers(1, LIMIT + MIB),
            st.none() | st.integers(MIB, LIMIT + MIB),
            st.booleans(),
        ),
        max_size=12,
    )
)
def test_whatever_is_asked_for_the_limit_holds(tmp_path_factory, asked):
    folder = make_folder(tmp_path_factory.mktemp("cache"), LIMIT)
    in_use = {}
    try:
        for about, size, budget, ends in asked:
            if about not in in_use:
                in_use[about] = folder.open(about)[1]
            before = reserved(folder)
            granted = folder.reserve(about, size, budget)
            after = reserved(folder)
            assert granted == after[about.name] >= before[about.name]
            assert granted <= max(before[about.name], budget or LIMIT // 2)
            assert sum(after.values()) <= LIMIT
            assert all(after[other.name] == before[other.name] for other in in_use if other != about)
            if ends:
                os.close(in_use.pop(about))
    finally:
        for jobs in in_use.values():
            os.close(jobs)
