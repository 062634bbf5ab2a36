"""Have kernels loaded before anything waits for them; compile what is not on disk in other processes.

To compile takes seconds and holds Python's lock: a thread that must answer in time cannot do so
meanwhile. So other processes do it, as many at a time as there are cores, and whoever needs the same
kernels on this machine waits for them. They are started once for a machine: later there are files.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from shoestring.compiled.store import NotStoredError, alone, loading_only

_PATIENCE_S = 300.0  # for a process that compiles; then this one does


def have_ready(module: str, jobs: Mapping[str, Callable[[], None]], say: Callable[[str], None]) -> None:
    """Run jobs, which call kernels, with all of these loaded.

    `python -m module NAME` runs the job of that name in a process of its own. `say` is told before
    anything is compiled.
    """
    missing = _missing(jobs)
    if missing:
        with alone("compiling") as is_kept:
            missing = _missing({name: jobs[name] for name in missing})
            once = "for this machine, once" if is_kept else "which cannot be kept"
            if missing:
                say(f"compiling kernels {once}: {', '.join(missing)}")
            if missing and is_kept:
                with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
                    list(pool.map(lambda name: _compile(module, name), missing))
    for name in missing:
        jobs[name]()


def _missing(jobs: Mapping[str, Callable[[], None]]) -> list[str]:
    """The jobs that call kernels which are not on disk; the others are done."""
    missing = []
    for name, job in jobs.items():
        try:
            with loading_only():
                job()
        except NotStoredError:
            missing.append(name)
    return missing


def _compile(module: str, name: str) -> None:
    """Run a job elsewhere. Where that fails, it is compiled here, and says why it cannot be."""
    command = [sys.executable, "-m", module, name]
    quiet = subprocess.DEVNULL
    try:
        subprocess.run(command, stdin=quiet, stdout=quiet, stderr=quiet, timeout=_PATIENCE_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return
