"""The error tree. Every error says what was found, and its hint says what to do.

`ShoestringError` is the only base: catching it catches everything this package
raises on purpose. The command line prints one as `error:`, a blank line and
`hint:`, and leaves with `exit_code`.
"""

from typing import ClassVar


class ShoestringError(Exception):
    """What went wrong, with a hint: a command to run or a setting to change."""

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} (hint: {self.hint})"


class UsageError(ShoestringError):
    """A value the user gave is not one that can be used."""

    exit_code = 2


class CodecError(ShoestringError):
    """A codec cannot do what it was asked."""


class UnknownCodecError(CodecError, UsageError):
    """No codec of that name, or no such option."""


class NonFiniteError(CodecError):
    """NaN or infinity where a number was expected; nothing was sent or kept."""


class StreamError(CodecError):
    """Bytes that are not a whole, valid stream of the expected codec and layout."""


class WireError(ShoestringError):
    """Bytes from the network that are not a whole, valid message; they change nothing."""


class DamagedError(WireError):
    """Bytes that were changed on their way, or never were a message."""


class LinkError(ShoestringError):
    """An address cannot be listened on, or does not answer."""


class KeyFileError(UsageError):
    """A key file that is missing, unreadable, or already there."""


class JoinError(ShoestringError):
    """A worker or shard that does not fit the run it wants to take part in."""


class StaleWorkerError(JoinError):
    """A process that speaks for a worker whose place another process has taken."""


class EndedError(ShoestringError):
    """A run that was followed has ended: no newer parameters will come."""


class OverdueError(ShoestringError):
    """What was waited for has not come in the time that the caller gave."""


class RuleError(UsageError):
    """An optimizer, or a setting of one, that the shards have no rule for."""


class SnapshotError(ShoestringError):
    """A checkpoint that is missing, incomplete or damaged; names the file."""


class FleetError(ShoestringError):
    """A job, device or plan that cannot be used as it is."""
