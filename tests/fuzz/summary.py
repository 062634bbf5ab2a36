"""What a decoder did with hostile bytes."""

from dataclasses import dataclass, field

MEMORY_LIMIT_MB = 64.0


@dataclass
class Summary:
    """`foreign_exceptions` and `broken_promises` must stay 0, the memory bounded, `findings` empty."""

    errors: int = 0
    decoded: int = 0
    foreign_exceptions: int = 0
    broken_promises: int = 0
    memory_growth_mb: float = 0.0
    slowest_s: float = 0.0
    seconds: float = 0.0
    seed: int = 0
    findings: list[str] = field(default_factory=list)

    @property
    def bad(self) -> int:
        return self.foreign_exceptions + self.broken_promises

    @property
    def is_clean(self) -> bool:
        return self.bad == 0 and self.memory_growth_mb < MEMORY_LIMIT_MB
