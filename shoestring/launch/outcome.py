"""How a run went, whichever launcher ran it."""

from dataclasses import dataclass, field

from shoestring.observe.progress import Board


@dataclass(frozen=True)
class Failure:
    """The process that ended a run, and what it said last."""

    who: str
    code: int  # as a shell counts it: 128 and the signal for one that was killed
    last_lines: tuple[str, ...]


@dataclass
class Outcome:
    """How a run went. An exit code is `None` for a worker that was never started."""

    seconds: float = 0.0
    exit_codes: list[int | None] = field(default_factory=list)
    failure: Failure | None = None
    begun: int = 0  # workers whose scripts called `init`
    joined: int = 0  # workers that joined by `wrap`

    def count(self, board: Board) -> None:
        """Take from a board how many workers took part."""
        self.begun, self.joined = len(board.begun), len(board.workers)

    def warning(self) -> str | None:
        """What to tell about a run that succeeded, if its workers had nothing to do with each other."""
        workers = len(self.exit_codes)
        if self.failure is not None or workers == 1 or self.joined:
            return None
        why = "called `shoestring.init` but never `wrap`" if self.begun else "never joined the run"
        return (
            f"all {workers} workers ran the script each by itself, with results of its own: it {why}. "
            "Write `model = shoestring.wrap(model)` behind the line that builds the model"
        )
