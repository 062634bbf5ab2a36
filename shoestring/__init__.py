"""Train PyTorch models on the machines you have.

The public names, and nothing else. Each is loaded when it is first used, so
`import shoestring` costs nothing and needs neither NumPy nor torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoestring.cache.dataset import cached
    from shoestring.client.follow import Follower, follow
    from shoestring.client.version import Version
    from shoestring.codec.base import Layout
    from shoestring.codec.feedback import Feedback
    from shoestring.codec.registry import make as make_codec
    from shoestring.errors import ShoestringError
    from shoestring.launch.start import init, wrap
    from shoestring.worker.batchnorm.layers import share_batchnorm, unshare_batchnorm
    from shoestring.worker.capture import keep
    from shoestring.worker.data.batches import batches, epochs
    from shoestring.worker.data.feed import feed
    from shoestring.worker.data.split import split
    from shoestring.worker.reporter import report
    from shoestring.worker.rounds.policy import Async, AutoPolicy, Bounded, EveryStep, LocalSteps

__version__ = "0.1.0"

__all__ = [
    "Async",
    "AutoPolicy",
    "Bounded",
    "EveryStep",
    "Feedback",
    "Follower",
    "Layout",
    "LocalSteps",
    "ShoestringError",
    "Version",
    "__version__",
    "batches",
    "cached",
    "epochs",
    "feed",
    "follow",
    "init",
    "keep",
    "make_codec",
    "report",
    "share_batchnorm",
    "split",
    "unshare_batchnorm",
    "wrap",
]

_HOMES = {
    "Async": ("shoestring.worker.rounds.policy", "Async"),
    "AutoPolicy": ("shoestring.worker.rounds.policy", "AutoPolicy"),
    "Bounded": ("shoestring.worker.rounds.policy", "Bounded"),
    "EveryStep": ("shoestring.worker.rounds.policy", "EveryStep"),
    "Feedback": ("shoestring.codec.feedback", "Feedback"),
    "Follower": ("shoestring.client.follow", "Follower"),
    "Layout": ("shoestring.codec.base", "Layout"),
    "LocalSteps": ("shoestring.worker.rounds.policy", "LocalSteps"),
    "ShoestringError": ("shoestring.errors", "ShoestringError"),
    "Version": ("shoestring.client.version", "Version"),
    "batches": ("shoestring.worker.data.batches", "batches"),
    "cached": ("shoestring.cache.dataset", "cached"),
    "epochs": ("shoestring.worker.data.batches", "epochs"),
    "feed": ("shoestring.worker.data.feed", "feed"),
    "follow": ("shoestring.client.follow", "follow"),
    "init": ("shoestring.launch.start", "init"),
    "keep": ("shoestring.worker.capture", "keep"),
    "make_codec": ("shoestring.codec.registry", "make"),
    "report": ("shoestring.worker.reporter", "report"),
    "share_batchnorm": ("shoestring.worker.batchnorm.layers", "share_batchnorm"),
    "split": ("shoestring.worker.data.split", "split"),
    "unshare_batchnorm": ("shoestring.worker.batchnorm.layers", "unshare_batchnorm"),
    "wrap": ("shoestring.launch.start", "wrap"),
}


def __getattr__(name: str) -> Any:
    try:
        module, attribute = _HOMES[name]
    except KeyError:
        raise AttributeError(f"module `shoestring` has no attribute `{name}`") from None
    if module.startswith("shoestring.worker"):
        import_module("shoestring.launch.start")  # whatever is used first joins the run
    value = getattr(import_module(module), attribute)
    globals()[name] = value  # the next use does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
