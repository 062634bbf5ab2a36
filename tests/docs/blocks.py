"""Find the fenced code blocks of the documentation.

A comment on the line above a block says how to treat it:

    <!-- not run: why it cannot be -->
    <!-- fresh -->          starts over: shares no names with the Python blocks before it
"""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

_FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>`{3,})(?P<language>[\w+-]*) *$")
_NOT_RUN = re.compile(r"^<!-- not run: *(?P<reason>.*?) *-->$")
_FRESH = "<!-- fresh -->"


@dataclass(frozen=True)
class Block:
    file: Path
    line: int  # of the opening fence, from 1
    language: str
    text: str
    not_run: str | None = None  # the reason, where the block is marked
    is_fresh: bool = False

    @property
    def name(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line}"


@dataclass(frozen=True)
class Command:
    text: str
    output: str  # as the block shows it; empty where it shows none


def documents() -> list[Path]:
    """List every file whose blocks are checked."""
    files = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md"]
    files += sorted((ROOT / "docs").rglob("*.md")) + sorted((ROOT / "shoestring").rglob("README.md"))
    return files


def all_blocks() -> list[Block]:
    return [block for file in documents() for block in blocks_of(file, file.read_text())]


def blocks_of(file: Path, text: str) -> list[Block]:
    """List the fenced blocks of one document."""
    lines = text.splitlines()
    found = []
    at = 0
    while at < len(lines):
        fence = _FENCE.match(lines[at])
        if fence is None:
            at += 1
            continue
        start = at
        closing = fence["indent"] + fence["ticks"]
        at += 1
        while at < len(lines) and lines[at].rstrip() != closing:
            at += 1
        if at == len(lines):
            raise ValueError(f"{file}:{start + 1}: this block is never closed")
        body = [line.removeprefix(fence["indent"]) for line in lines[start + 1 : at]]
        above = lines[start - 1].strip() if start else ""
        mark = _NOT_RUN.match(above)
        found.append(
            Block(
                file=file,
                line=start + 1,
                language=fence["language"],
                text="".join(f"{line}\n" for line in body),
                not_run=mark["reason"] if mark else None,
                is_fresh=above == _FRESH,
            )
        )
        at += 1
    return found


def chains(blocks: list[Block]) -> list[list[Block]]:
    """Group Python blocks that share their names: those of one file, up to a fresh one."""
    grouped: list[list[Block]] = []
    for block in blocks:
        if block.language != "python" or block.not_run is not None:
            continue
        if block.is_fresh or not grouped or grouped[-1][0].file != block.file:
            grouped.append([])
        grouped[-1].append(block)
    return grouped


def commands_of(block: Block) -> list[Command]:
    """Split a block into commands: a `console` block marks them with `$ `, in `bash` every line is one."""
    text = block.text.replace("\\\n", " ")
    if block.language == "bash":
        lines = [line.strip() for line in text.splitlines()]
        return [Command(line, "") for line in lines if line and not line.startswith("#")]
    head, *parts = re.split(r"^\$ ", text, flags=re.MULTILINE)
    if head.strip():
        raise ValueError(f"{block.name}: a console block starts with `$ command`")
    splits = [part.partition("\n") for part in parts]
    return [Command(command, output.rstrip("\n")) for command, _, output in splits]
