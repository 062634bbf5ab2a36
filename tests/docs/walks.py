"""The ways of a gradient, a checkpoint and a job, as docs/architecture.md tells them."""

import re

from tests.docs.blocks import ROOT

PAGE = ROOT / "docs" / "architecture.md"
_NAMED = re.compile(r"`([a-z_/]+\.py)`|`([A-Za-z_]\w*(?:\.\w+)?)`")


def walk(title: str) -> list[tuple[str, str]]:
    """The steps of one way, as (file, function): a name belongs to the file named last before it."""
    section = PAGE.read_text().partition(f"## {title}\n")[2].partition("\n## ")[0]
    steps = []
    for line in section.splitlines():
        file = ""
        for path, name in _NAMED.findall(line) if re.match(r"\d+\. ", line) else ():
            file = path or file
            if name and file:
                steps.append((file, name))
    return steps
