"""After the warm-up a shard compiles nothing more."""

from shoestring.server import kernels
from shoestring.server.warmup import warm_up


def test_every_rule_is_compiled():
    warm_up()
    names = ["sgd", "momentum", "adam", "amsgrad"]
    compiled = [getattr(kernels, f"{kind}_{name}") for kind in ("update", "apply") for name in names]
    assert all(kernel.signatures for kernel in [*compiled, kernels.sum_squares])
