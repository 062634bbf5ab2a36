"""What the codec `dct` can be told."""

from dataclasses import dataclass

from shoestring.errors import UsageError


@dataclass(frozen=True)
class Options:
    """What `dct` can be told.

    block: side of the blocks, 4, 8, 16 or 32; 0: a convolution's own kernel, 8 for the rest
    transform: `auto` chooses per tensor by measured rate; `always`; `never`
    step: quantisation step over the tensor's rms, where no budget is given
    bits: budget of bits a value over the bucket, instead of a step
    small: tensors of fewer values are sent as floats
    small_as: `float16` (with a power of two as its scale) or `float32`
    """

    block: int = 0
    transform: str = "auto"
    step: float = 2.0
    bits: float | None = None
    small: int = 256
    small_as: str = "float16"

    def __post_init__(self) -> None:
        _require(self.block in (0, 4, 8, 16, 32), "`block` must be 4, 8, 16 or 32, or 0 to fit each tensor")
        _require(self.transform in ("auto", "always", "never"), "`transform` must be auto, always or never")
        _require(2.0**-8 <= self.step <= 2.0**10, "`step` must be from 0.004 to 1024")
        _require(self.bits is None or 0 < self.bits <= 32, "`bits` must be above 0 and at most 32")
        _require(0 <= self.small <= 1 << 20, "`small` must be from 0 to 1048576")
        _require(self.small_as in ("float16", "float32"), "`small_as` must be float16 or float32")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise UsageError(message, hint="`shoestring codecs` lists the options and their defaults")
