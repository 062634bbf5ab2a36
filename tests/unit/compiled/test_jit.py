"""Processes that start together compile kernels once."""

import fcntl

import pytest

from shoestring.compiled import jit


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(jit, "_FOLDER", str(tmp_path / "kernels"))
    return tmp_path / "kernels"


def is_free(folder) -> bool:
    (path,) = folder.glob("things-*.lock")
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def test_others_wait_while_the_first_compiles(folder):
    with jit.compiled_once("things"):
        assert not is_free(folder)
    assert is_free(folder)


def test_nobody_waits_for_what_is_compiled(folder):
    with jit.compiled_once("things"):
        pass
    with jit.compiled_once("things"):
        assert is_free(folder)
    with jit.compiled_once("others"):
        assert is_free(folder)


def test_who_finds_it_compiled_after_waiting_lets_the_others_go_on(folder, monkeypatch):
    monkeypatch.setattr(jit, "_wait_for", lambda lock, done: (fcntl.flock(lock, fcntl.LOCK_EX), done.touch()))
    with jit.compiled_once("things"):
        assert is_free(folder)


def test_nobody_waits_for_ever(folder, monkeypatch):
    monkeypatch.setattr(jit, "_PATIENCE_S", 0.0)
    entered = []
    with jit.compiled_once("things"), jit.compiled_once("things"):
        entered.append(True)
    assert entered


def test_what_failed_is_not_compiled(folder):
    with pytest.raises(ZeroDivisionError), jit.compiled_once("things"):
        raise ZeroDivisionError
    with jit.compiled_once("things"):
        assert not is_free(folder)


def test_a_folder_that_cannot_be_written_is_done_without(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(jit, "_FOLDER", str(tmp_path / "file" / "kernels"))
    entered = []
    with jit.compiled_once("things"):
        entered.append(True)
    assert entered
