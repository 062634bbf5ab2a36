"""A share of some cores' time, through a control group of the kernel.

Works where this process may make control groups with a CPU limit: as root, or where one was
delegated to it. Both versions of the kernel's interface are known. Slices of time are short, so
that steps take as long as on a slower core, rather than meet full speed and standstill in turn.
"""

import contextlib
import os
import re
from pathlib import Path

from shoestring.errors import FleetError

PERIOD_US = 10_000
_LEAST_US = 1_000  # the kernel takes no less
ROOT = Path("/sys/fs/cgroup")


class Quota:
    """A control group that gives its processes `cpus` cores' worth of time. Close it to remove it."""

    def __init__(self, name: str, cpus: float, root: Path = ROOT) -> None:
        quota_us = max(_LEAST_US, round(cpus * PERIOD_US))
        name = f"shoestring-{os.getpid()}-{name}"
        first, second = root / "cpu" / name, _own_group(root) / name
        is_first = (root / "cpu" / "cpu.cfs_quota_us").exists()
        self.folder = first if is_first else second
        _sweep(self.folder.parent)
        try:
            self.folder.mkdir()
            if is_first:
                _write(self.folder / "cpu.cfs_period_us", str(PERIOD_US))
                _write(self.folder / "cpu.cfs_quota_us", str(quota_us))
            else:
                _write(self.folder / "cpu.max", f"{quota_us} {PERIOD_US}")
        except OSError as error:
            self.close()
            raise FleetError(
                f"a share of {cpus:g} cores cannot be set: {error}",
                hint="a share needs root and a CPU control group; give the device whole cores, "
                "such as `slow=1`",
            ) from None

    def close(self) -> None:
        """Remove the group, if no process is left in it."""
        with contextlib.suppress(OSError):
            self.folder.rmdir()


def _sweep(parent: Path) -> None:
    """Remove the control groups of processes that were killed."""
    for group in parent.glob("shoestring-*-*"):
        number = group.name.split("-")[1]
        if number.isdecimal() and not Path("/proc", number).exists():
            with contextlib.suppress(OSError):  # not empty: another's process is in it
                group.rmdir()


def _write(path: Path, text: str) -> None:
    # `r+` creates no file: where the kernel has no such limit, opening the file fails.
    with path.open("r+") as file:
        file.write(text)


def _own_group(root: Path) -> Path:
    """The group of the second version's tree that this process is in."""
    try:
        found = re.search(r"^0::/(.*)$", Path("/proc/self/cgroup").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return root / found[1] if found else root
