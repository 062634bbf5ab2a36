"""How a run went, whichever launcher ran it."""

from dataclasses import dataclass, field


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
