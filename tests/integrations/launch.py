"""Start the examples as users do: plain, under DistributedDataParallel, and as their diff changes them."""

import os
import re
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import shoestring
from shoestring.config import Run
from shoestring.integrations.place import VARIABLES

ROOT = Path(__file__).parents[2]
LIMIT_S = 150

# Nothing is fetched, and two processes share two cores.
QUIET = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


@dataclass(frozen=True)
class Example:
    """A plain script in `examples/`, and the diff beside it."""

    name: str

    @property
    def plain(self) -> Path:
        return ROOT / "examples" / f"{self.name}.py"

    @property
    def diff(self) -> str:
        return self.plain.with_suffix(".diff").read_text()

    def changed_lines(self) -> tuple[int, int]:
        """How many lines the diff takes away and adds."""
        body = self.diff.splitlines()[2:]
        return sum(line.startswith("-") for line in body), sum(line.startswith("+") for line in body)

    def changed(self, folder: Path) -> Path:
        """Write the script as the diff makes it."""
        path = folder / "train.py"
        path.write_text(patched(self.plain.read_text(), self.diff))
        return path


def patched(text: str, diff: str) -> str:
    """Apply a unified diff, each line of which must fit."""
    lines, out, at = text.splitlines(), [], 0
    for line in diff.splitlines()[2:]:
        begins = re.match(r"@@ -(\d+)", line)
        if begins:
            start = int(begins[1]) - 1
            out += lines[at:start]
            at = start
        elif line.startswith("+"):
            out.append(line[1:])
        else:
            assert line[1:] == lines[at], f"line {at + 1} is not what the diff says"
            out += [lines[at]] * line.startswith(" ")
            at += 1
    return "\n".join([*out, *lines[at:], ""])


def run_ddp(script: Path, *arguments: object) -> None:
    """Run two processes of a script with the variables that torchrun sets."""
    told = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
    }
    told["ACCELERATE_USE_CPU"] = "true"  # as `accelerate launch --cpu` says
    command = [sys.executable, str(script), *map(str, arguments)]
    processes = [
        subprocess.Popen(
            command,
            env=environment(**told, RANK=str(rank), LOCAL_RANK=str(rank)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for process in processes:
            output, _ = process.communicate(timeout=LIMIT_S)
            # Torch ends a process so, now and then, whose script has left its process group open: all is
            # done and written by then.
            is_torn_down = output.rstrip().endswith("terminate called without an active exception")
            assert process.returncode == 0 or is_torn_down, output[-4000:]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def run_shoestring(
    script: Path, *arguments: object, codec: str = "float32", folder: Path | None = None
) -> str:
    """Run two workers of a script, and return what they printed."""
    done = start_shoestring(script, *arguments, codec=codec, folder=folder)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout + done.stderr


def start_shoestring(
    script: Path, *arguments: object, codec: str = "float32", folder: Path | None = None
) -> "subprocess.CompletedProcess[str]":
    """Like `run_shoestring`, for a run that may fail."""
    options = ["--workers", 2, "--codec", codec, "--folder", folder or script.parent / "run"]
    command = [sys.executable, "-m", "shoestring", "run", *options, script, *arguments]
    return subprocess.run(
        list(map(str, command)), env=environment(), capture_output=True, text=True, timeout=LIMIT_S
    )


def environment(**more: str) -> dict[str, str]:
    """This process's environment without what an outer run or launcher has said."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in names and not name.startswith(("SHOESTRING_", "PYTEST_"))
    }
    path = os.pathsep.join(part for part in (os.environ.get("PYTHONPATH", ""), str(ROOT)) if part)
    return kept | QUIET | {"PYTHONPATH": path} | more


def told_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process be the second worker of two, of which libraries have not heard."""
    monkeypatch.setattr(shoestring, "init", lambda: Run(worker=1, workers=2))
    for name in VARIABLES:
        monkeypatch.setenv(name, "0")


def free_port() -> str:
    """A port that nobody listens on now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])
