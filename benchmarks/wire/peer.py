"""A process of `python -m benchmarks.wire`: a worker that trains alone, with torch's own optimizer.

Speaks lines of JSON as the processes of `shoestring bench wire` do.
"""

import json
import sys
from typing import Any

from shoestring.bench.wire.peer import Worker, obey, rehearse, take_stdout


class LoneWorker(Worker):
    """A worker in no run."""

    def plain(self, told: dict[str, Any]) -> dict[str, Any]:
        """Train alone."""
        model, optimizer = self.model()
        for step in range(1, told["times"] + 1):
            self.set_gradients(optimizer, step)
            optimizer.step()
        self._plain = (model, optimizer)  # kept: its memory is what is asked for
        return {}


def main() -> None:
    say = take_stdout()
    told = json.loads(sys.argv[1])
    rehearse(told["codecs"])
    obey({"plain": LoneWorker(told).plain}, say)


if __name__ == "__main__":
    main()
