"""`python -m shoestring.fleet.engine.confine ... -- COMMAND`: limit this process, then become COMMAND.

A process of its own does it, before the command is there: a limit set later would miss the
threads that were started first. The command ends when the process that asked for it does.
"""

import argparse
import contextlib
import ctypes
import os
import resource
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def confined(
    command: Sequence[str], *, cores: Sequence[int] = (), group: Path | None = None, memory_bytes: int = 0
) -> list[str]:
    """The command line that runs `command` on these cores, in this control group, with this much memory."""
    options = []
    if cores:
        options += ["--cores", ",".join(map(str, cores))]
    if group is not None:
        options += ["--group", str(group)]
    if memory_bytes:
        options += ["--memory", str(memory_bytes)]
    return [sys.executable, "-m", __name__, "--parent", str(os.getpid()), *options, "--", *command]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Limit this process, then become COMMAND.")
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--cores", default="")
    parser.add_argument("--group", type=Path)
    parser.add_argument("--memory", type=int, default=0)
    parser.add_argument("command", nargs="+")
    given = parser.parse_args(arguments)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != given.parent:  # gone before it could be watched
        sys.exit(1)
    if given.group is not None:
        (given.group / "cgroup.procs").write_text(str(os.getpid()))
    if given.cores:
        os.sched_setaffinity(0, {int(core) for core in given.cores.split(",")})
    if given.memory:
        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        limit = given.memory if most == resource.RLIM_INFINITY else min(given.memory, most)
        with contextlib.suppress(ValueError, OSError):  # a limit that cannot be set is none
            resource.setrlimit(resource.RLIMIT_DATA, (limit, most))
    os.execvp(given.command[0], given.command)


if __name__ == "__main__":
    main()
