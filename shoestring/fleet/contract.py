"""The contract between a fleet and the scripts it runs: what both sides say and read, written once.

A fleet asks through environment variables; `shoestring.worker.trial` obeys inside the script.

| variable | meaning |
|---|---|
| `SHOESTRING_BATCH` | the batch size, for the script itself to read |
| `SHOESTRING_MEMORY_BYTES` | the most GPU memory that the process may take |
| `SHOESTRING_STOP` | once this file exists, the script ends behind its next checkpoint, with exit code 75 |
| `SHOESTRING_PROBE` | this start is a trial: time some steps, write them to this file, end with exit code 0 |
| `SHOESTRING_PROBE_STEPS` | steps that a trial times at least; 20, if not given |
| `SHOESTRING_PROBE_SECONDS` | seconds that the timed steps of a trial take at least |
| `SHOESTRING_PROBE_GATE` | a trial waits behind its first step until this file exists |

A trial is a short run of a script in which its steps are timed. One with a gate says that its
first step is done with an empty file beside the result, of the same name with `.ready` at the
end. The result is a JSON object, see `TrialResult`; it appears whole or not at all.

`SHOESTRING_CHECKPOINT`, `SHOESTRING_EVERY`, `SHOESTRING_FOLDER` and `SHOESTRING_RUN` are settings
of any run: see `config.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Self

import msgspec

from shoestring.errors import FleetError, UsageError

STOPPED = 75  # the exit code of a script that was asked to stop and ended behind a checkpoint
FEWEST_STEPS = 3  # in a result: fewer say nothing about how much steps differ

BATCH = "SHOESTRING_BATCH"
MEMORY_BYTES = "SHOESTRING_MEMORY_BYTES"
STOP = "SHOESTRING_STOP"
_RESULT = "SHOESTRING_PROBE"
_STEPS = "SHOESTRING_PROBE_STEPS"
_SECONDS = "SHOESTRING_PROBE_SECONDS"
_GATE = "SHOESTRING_PROBE_GATE"

_DEFAULT_STEPS = 20
_RESULT_BYTES = 1 << 20

_Seconds = Annotated[float, msgspec.Meta(ge=0)]
_Bytes = Annotated[int, msgspec.Meta(ge=0)]


@dataclass(frozen=True)
class TrialRequest:
    """What a fleet asks of one trial."""

    result: Path
    steps: int = _DEFAULT_STEPS
    seconds: int = 0
    gate: Path | None = None

    @property
    def ready(self) -> Path:
        """The file by which a trial with a gate says that its first step is done."""
        return self.result.with_suffix(".ready")

    def to_environment(self) -> dict[str, str]:
        """The variables by which `of` gives this request back."""
        variables = {_RESULT: str(self.result), _STEPS: str(self.steps), _SECONDS: str(self.seconds)}
        return variables if self.gate is None else {**variables, _GATE: str(self.gate)}

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Self | None:
        """Read the request of an environment; None if the process is no trial."""
        if not environment.get(_RESULT):
            return None
        return cls(
            Path(environment[_RESULT]),
            read_number(environment, _STEPS) or _DEFAULT_STEPS,
            read_number(environment, _SECONDS),
            Path(environment[_GATE]) if environment.get(_GATE) else None,
        )


class TrialResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a trial measured. Times of day are the wall clock's, in seconds."""

    step_s: Annotated[list[_Seconds], msgspec.Meta(min_length=FEWEST_STEPS)]  # each timed step, in order
    first_at: _Seconds  # when the first step of all began
    ended_at: _Seconds
    peak_bytes: _Bytes  # the most memory: of the process, or what the allocator of the GPU reserved
    beside_bytes: _Bytes = 0  # GPU memory in use beside that allocator, by anyone

    def write(self, path: Path) -> None:
        """Write the result to a file that appears whole."""
        part = path.with_suffix(".part")
        part.write_bytes(msgspec.json.encode(self))
        part.replace(path)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read and check the result of a trial."""
        try:
            with path.open("rb") as file:
                return msgspec.json.decode(file.read(_RESULT_BYTES), type=cls)
        except (OSError, ValueError) as error:
            raise FleetError(
                f"`{path}` is no result of a trial: {error}",
                hint="measure the job again with `shoestring fleet profile`; "
                "its script must use the same shoestring as the fleet",
            ) from None


def read_number(environment: Mapping[str, str], name: str) -> int:
    """Read a whole number from a variable; 0 if it is not set."""
    text = environment.get(name) or "0"
    if not text.isdecimal():
        raise UsageError(f"`{name}` is `{text}`, expected a whole number", hint=f"unset `{name}`")
    return int(text)
