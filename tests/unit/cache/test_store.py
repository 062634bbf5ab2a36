"""One dataset's database: within its budget, across forks, with claims that die with their holder."""

import os
import shutil
import signal
import threading

import numpy as np
import pytest

from shoestring.cache import store as cachestore
from shoestring.cache.folder import About
from shoestring.cache.store import close_store, open_store
from shoestring.errors import FleetError
from tests.unit.cache.cachejobs import FORK, TIMEOUT_S, expect_success, make_folder, process

MIB = 1 << 20
ABOUT = About("numbers", "", 1000)


@pytest.fixture
def folder(tmp_path):
    folder = make_folder(tmp_path / "cache")
    yield folder
    close_store(folder, ABOUT)


def test_what_is_put_is_there_for_all(folder):
    store = open_store(folder, ABOUT)
    assert store is open_store(folder, ABOUT)
    assert store.get(3) is None
    assert store.put(3, bytearray(b"three"))
    assert store.put(5, bytearray(b"five"))
    assert store.put(3, bytearray(b"again"))
    assert (store.get(3), store.get(5), store.count()) == (b"again", b"five", 2)
    close_store(folder, ABOUT)
    assert open_store(folder, ABOUT).get(5) == b"five"


@pytest.mark.parametrize("budget", [MIB, 5 * MIB, None])
@pytest.mark.parametrize("most", [100, 5_000, 200_000])
def test_the_file_never_outgrows_budget_or_limit(folder, budget, most):
    source = np.random.default_rng(most)
    folder.limit_bytes = 16 * MIB
    store = open_store(folder, ABOUT)
    file = folder.path_of(ABOUT) / "data.mdb"
    bound = budget or folder.limit_bytes // 2
    stored = 0
    for index in range(200_000 if most == 100 else 4_000):
        stored += store.put(index, bytearray(int(source.integers(1, most))), budget)
        if store.is_full:
            break
        if index % 50 == 0:
            assert file.stat().st_size <= bound
    assert store.is_full
    assert file.stat().st_size <= bound
    assert store.count() == stored
    # The slack, and one sample that did not fit, are all that may be left.
    assert file.stat().st_size > bound - (cachestore._SLACK_PAGES + 2) * 4096 - most


def test_a_full_store_keeps_what_it_has_and_takes_more_when_there_is_room(folder, monkeypatch):
    store = open_store(folder, ABOUT)
    assert store.put(0, bytearray(1000), MIB)
    assert not store.put(1, bytearray(2 * MIB), MIB)
    assert store.is_full
    assert not store.put(2, bytearray(1000), MIB)
    assert store.get(0) == bytes(1000)
    monkeypatch.setattr(store, "_full_until", 0.0)
    assert store.put(2, bytearray(1000), MIB)


def claim_and_wait(folder, index, claimed):
    with open_store(folder, ABOUT).claim(index) as is_mine:
        assert is_mine
        claimed.set()
        signal.pause()


def test_a_claim_excludes_other_processes_and_is_free_when_its_holder_is_killed(folder):
    claimed = FORK.Event()
    store = open_store(folder, ABOUT)
    with process(claim_and_wait, folder, 7, claimed) as holder:
        assert claimed.wait(TIMEOUT_S)
        with store.claim(7) as is_mine, store.claim(8) as is_other:
            assert (is_mine, is_other) == (False, True)
        holder.kill()
        holder.join(TIMEOUT_S)
        with store.claim(7) as is_mine:
            assert is_mine


def test_a_claim_excludes_other_threads(folder):
    store = open_store(folder, ABOUT)
    seen = []

    def look():
        with store.claim(7) as is_mine:
            seen.append(is_mine)

    with store.claim(7):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join(TIMEOUT_S)
    look()
    assert seen == [False, True]


def test_a_process_that_is_stopped_while_it_writes_holds_nobody_up(folder, monkeypatch):
    monkeypatch.setattr(cachestore, "_TURN_TIMEOUT_S", 0.05)
    claimed = FORK.Event()
    store = open_store(folder, ABOUT)
    with process(claim_and_wait, folder, cachestore._TURN, claimed) as holder:
        assert claimed.wait(TIMEOUT_S)
        assert not store.put(0, bytearray(10))
        assert store.get(0) is None
        holder.kill()
        holder.join(TIMEOUT_S)
        assert store.put(0, bytearray(10))


def fork_again(folder, index):
    store = open_store(folder, ABOUT)
    assert store.get(0) == b"parent"
    assert store.put(index, bytearray(b"child"))
    if index < 3:
        with process(fork_again, folder, index + 1) as child:
            expect_success(child)
    assert store.get(index) == b"child"


def test_forked_processes_open_it_anew(folder):
    store = open_store(folder, ABOUT)
    store.put(0, bytearray(b"parent"))
    with store.claim(9), process(fork_again, folder, 1) as child:
        expect_success(child)
        assert store.get(3) == b"child"
        assert store.put(4, bytearray(b"parent"))


def hammer(store, stop, errors):
    try:
        index = 0
        while not stop.is_set():
            store.put(index % 100, bytearray(100))
            assert store.get(index % 100) == bytes(100)
            index += 1
    except Exception as error:
        errors.append(error)


def read_all(folder):
    store = open_store(folder, ABOUT)
    for index in range(100):
        assert store.get(index) in (None, bytes(100))
    with store.claim(5) as is_mine:
        assert is_mine


def test_a_fork_while_threads_read_and_write(folder):
    store, stop, errors = open_store(folder, ABOUT), threading.Event(), []
    threads = [threading.Thread(target=hammer, args=(store, stop, errors)) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(10):
            with process(read_all, folder) as child:
                expect_success(child)
    finally:
        stop.set()
        for thread in threads:
            thread.join(TIMEOUT_S)
    assert errors == []


def test_a_store_whose_files_were_removed_is_empty(folder):
    store = open_store(folder, ABOUT)
    store.put(0, bytearray(10))
    shutil.rmtree(folder.path_of(ABOUT))
    store.close_environment()
    assert store.get(0) is None
    assert not store.put(1, bytearray(10))


def test_a_folder_that_cannot_be_written_to_is_a_clear_error(folder):
    blocked = folder.path_of(ABOUT)
    blocked.mkdir()
    (folder.path / "lock").mkdir()
    with pytest.raises(FleetError, match="cannot be opened"):
        open_store(folder, ABOUT)
    os.rmdir(folder.path / "lock")
