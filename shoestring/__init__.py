"""Train PyTorch models on the machines you have.

The public names, and nothing else. Each is loaded when it is first used, so
`import shoestring` costs nothing and needs neither NumPy nor torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoestring.codec.base import Layout
    from shoestring.codec.feedback import Feedback
    from shoestring.codec.registry import make as make_codec
    from shoestring.errors import ShoestringError

__version__ = "0.1.0"

__all__ = ["Feedback", "Layout", "ShoestringError", "__version__", "make_codec"]

_HOMES = {
    "Feedback": ("shoestring.codec.feedback", "Feedback"),
    "Layout": ("shoestring.codec.base", "Layout"),
    "ShoestringError": ("shoestring.errors", "ShoestringError"),
    "make_codec": ("shoestring.codec.registry", "make"),
}


def __getattr__(name: str) -> Any:
    try:
        module, attribute = _HOMES[name]
    except KeyError:
        raise AttributeError(f"module `shoestring` has no attribute `{name}`") from None
    value = getattr(import_module(module), attribute)
    globals()[name] = value  # the next use does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
