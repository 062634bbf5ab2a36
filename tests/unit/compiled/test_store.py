"""Kernels on disk: later processes load them, and processes that start together compile them once."""

import contextlib
import fcntl
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from shoestring.compiled import store
from tests.unit.compiled.kernels import SOURCES, edited, load

ROOT = Path(__file__).parents[3]
PROGRAM = """
import json
import numpy as np
from shoestring.compiled.store import compiled_once
from top import special, top
values = np.arange(5)
with compiled_once():
    result = [int(top(values)), int(special(values))]
hits = [sum(kernel.stats.cache_hits.values()) for kernel in (top, special)]
misses = [sum(kernel.stats.cache_misses.values()) for kernel in (top, special)]
print(json.dumps([result, hits, misses]))
"""
RESULT = [26, 18]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "_folder", tmp_path / "kernels")
    return tmp_path / "kernels"


def start(tmp_path: Path, sources: dict[str, str]) -> subprocess.Popen[str]:
    """Call the kernels in a process of their own."""
    modules = tmp_path / "modules"
    modules.mkdir(exist_ok=True)
    for name, source in sources.items():
        (modules / f"{name}.py").write_text(source)
    given = {**os.environ, "PYTHONPATH": f"{modules}:{ROOT}", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    given.pop("NUMBA_CACHE_DIR", None)
    return subprocess.Popen([sys.executable, "-c", PROGRAM], env=given, stdout=subprocess.PIPE, text=True)


def end(process: subprocess.Popen[str]) -> list[list[int]]:
    """Return both kernels' results, what they loaded and what they compiled."""
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return json.loads(output)


def test_a_later_process_loads_what_an_earlier_one_compiled(tmp_path):
    assert end(start(tmp_path, SOURCES)) == [RESULT, [0, 0], [1, 1]]
    assert end(start(tmp_path, SOURCES)) == [RESULT, [1, 1], [0, 0]]
    commented = edited("leaf", "Look into the table.", "Look into the table.\n\n    Twice.")
    assert end(start(tmp_path, commented)) == [RESULT, [1, 1], [0, 0]]
    changed = edited("leaf", "OFFSET, SIGNS, UNUSED = 3, 7", "OFFSET, SIGNS, UNUSED = 3, 8")
    assert end(start(tmp_path, changed)) == [[31, 19], [0, 0], [1, 1]]


def test_processes_that_start_together_compile_once(tmp_path):
    processes = [start(tmp_path, SOURCES) for _ in range(3)]
    ends = [end(process) for process in processes]
    assert [result for result, _, _ in ends] == [RESULT] * 3
    assert sorted((hits, misses) for _, hits, misses in ends) == [([0, 0], [1, 1])] + [([1, 1], [0, 0])] * 2


def call(monkeypatch) -> int:
    """Call a kernel for the first time; return how often it was loaded."""
    top = load(monkeypatch, SOURCES).top
    assert top(np.arange(5)) == RESULT[0]
    return sum(top.stats.cache_hits.values())


@pytest.mark.parametrize("damage", [b"", b"not a kernel"])
def test_a_damaged_file_is_written_anew(folder, monkeypatch, damage):
    assert call(monkeypatch) == 0
    for path in folder.glob("top.*"):
        path.write_bytes(damage)
    assert call(monkeypatch) == 0
    assert call(monkeypatch) == 1


def test_a_folder_that_cannot_be_written_is_done_without(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(store, "_folder", tmp_path / "file" / "kernels")
    for context in (contextlib.nullcontext, store.compiled_once):
        with context():
            assert call(monkeypatch) == 0


def test_code_that_cannot_be_written_runs_all_the_same(folder, monkeypatch):
    def fail(result) -> None:
        raise RuntimeError("no compiled object yet")

    monkeypatch.setattr(store.CompileResult, "_reduce", fail)
    assert call(monkeypatch) == 0
    assert list(folder.glob("top.*")) == []


def test_threads_may_call_kernels_for_the_first_time_at_once(folder, monkeypatch):
    top = load(monkeypatch, SOURCES)
    kernels, results = [top.top, top.special], []
    ready = threading.Barrier(4)

    def first_call(kernel) -> None:
        ready.wait(timeout=60)
        results.append(kernel(np.arange(5)))

    threads = [threading.Thread(target=first_call, args=(kernels[k % 2],)) for k in range(4)]
    with store.compiled_once():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(results) == sorted(2 * RESULT)
    assert [len(list(folder.glob(f"{name}-*.kernel"))) for name in ("top.top", "top._template_2")] == [1, 1]


# Turns of processes that compile.


def is_free(folder: Path) -> bool:
    with (folder / "compiling.lock").open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def test_others_wait_from_the_first_kernel_that_is_missing_until_the_last_context_ends(folder, monkeypatch):
    call(monkeypatch)
    assert not (folder / "compiling.lock").exists()  # outside of a context nobody waits
    with store.compiled_once():
        call(monkeypatch)
        assert not (folder / "compiling.lock").exists()  # nor where all is compiled
        for path in folder.glob("top.*"):
            path.unlink()
        with store.compiled_once():
            call(monkeypatch)
            assert not is_free(folder)
        assert not is_free(folder)
    assert is_free(folder)


def test_what_fails_gives_the_turn_back(folder):
    with contextlib.suppress(KeyError), store.compiled_once():
        assert store._turn.take()
        raise KeyError
    assert is_free(folder)


def test_who_finds_a_kernel_after_waiting_lets_the_others_go_on(folder, monkeypatch):
    call(monkeypatch)
    hidden = [(path, path.read_bytes()) for path in folder.glob("top.*")]
    for path, _ in hidden:
        path.unlink()
    lock = store._wait_for

    def compile_elsewhere(file) -> None:
        for path, content in hidden:
            path.write_bytes(content)
        lock(file)

    monkeypatch.setattr(store, "_wait_for", compile_elsewhere)
    with store.compiled_once():
        assert call(monkeypatch) == 1
        assert is_free(folder)


def test_nobody_waits_for_ever(folder, monkeypatch):
    monkeypatch.setattr(store, "_PATIENCE_S", 0.0)
    folder.mkdir()
    with (folder / "compiling.lock").open("ab") as other, store.compiled_once():
        fcntl.flock(other, fcntl.LOCK_EX)
        assert call(monkeypatch) == 0
