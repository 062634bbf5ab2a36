"""Kernels on disk: later processes load them, and processes that start together compile them once."""

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
from top import special, top
values = np.arange(5)
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
    for kernel in (0, 1):
        assert sorted((hits[kernel], misses[kernel]) for _, hits, misses in ends) == [(0, 1), (1, 0), (1, 0)]


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
    assert call(monkeypatch) == 0
    with store.alone("name") as is_kept:
        assert not is_kept
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
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == sorted(2 * RESULT)
    assert [len(list(folder.glob(f"{name}-*.kernel"))) for name in ("top.top", "top._template_2")] == [1, 1]


# Processes that compile the same kernel.


def is_free(lock: Path) -> bool:
    with lock.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def test_a_kernel_is_locked_while_it_is_compiled_and_no_longer(folder, monkeypatch):
    reduce, locked = store.CompileResult._reduce, []

    def look(result):
        (own,) = [path for path in store._locked if path.name.startswith("top.")]
        locked.append((own.suffix, is_free(own.with_suffix(".lock"))))
        return reduce(result)

    monkeypatch.setattr(store.CompileResult, "_reduce", look)
    call(monkeypatch)  # what it calls is compiled meanwhile
    assert set(locked) == {(".kernel", False)}
    assert store._locked == {}
    assert list(folder.glob("*.lock")) == []


def test_who_finds_a_kernel_after_waiting_loads_it(folder, monkeypatch):
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
    assert call(monkeypatch) == 1
    assert store._locked == {}


def test_nobody_waits_for_ever(folder, monkeypatch):
    call(monkeypatch)
    (path,) = folder.glob("top.*")
    path.unlink()
    monkeypatch.setattr(store, "_PATIENCE_S", 0.0)
    with path.with_suffix(".lock").open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert call(monkeypatch) == 0


def test_what_failed_to_compile_may_be_tried_again(folder, monkeypatch):
    broken = load(
        monkeypatch, edited("leaf", "OFFSET, SIGNS, UNUSED = 3, 7", "OFFSET, SIGNS, UNUSED = 'a', 7")
    )
    for _ in range(2):
        with pytest.raises(Exception, match="str"):
            broken.top(np.arange(5))
    for file in store._locked.values():
        file.close()
    store._locked.clear()


def test_what_is_not_on_disk_may_be_left_to_others(folder, monkeypatch):
    top = load(monkeypatch, SOURCES).top
    with pytest.raises(store.NotStoredError), store.loading_only():
        top(np.arange(5))
    assert not folder.exists()
    assert top(np.arange(5)) == RESULT[0]
    other = load(monkeypatch, SOURCES).top
    with store.loading_only():
        assert other(np.arange(5)) == RESULT[0]


def test_one_process_at_a_time_is_alone(folder):
    with store.alone("name") as is_kept:
        assert is_kept
        assert not is_free(folder / "name.lock")
    assert is_free(folder / "name.lock")
