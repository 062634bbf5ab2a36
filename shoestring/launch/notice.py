"""One line to the user, on stderr: stdout is the script's own."""

import sys


def say(text: str) -> None:
    print(f"shoestring: {text}", file=sys.stderr, flush=True)
