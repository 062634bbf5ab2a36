"""Name the code blocks that no test runs at the end of every run: they are the ones that rot."""

from tests.docs.blocks import all_blocks


def pytest_terminal_summary(terminalreporter):
    marked = [block for block in all_blocks() if block.not_run is not None]
    if marked:
        terminalreporter.section("code blocks that are not run")
        for block in marked:
            terminalreporter.line(f"{block.name}: {block.not_run}")
