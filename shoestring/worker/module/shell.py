"""Give a wrapped model `no_sync` and `module`, and let it be copied and pickled like a plain one.

The model stays the script's own object, with its own names in `state_dict`. Its class becomes a
subclass of the same name. A deep copy (an average of weights, say) and a pickle are of the plain class
again and know nothing of the run, so `torch.load` needs nothing of ours to read them.
"""

import copyreg
import types
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn

from shoestring.errors import UsageError

_modules: Any = copyreg
_NEW, _REBUILD = _modules.__newobj__, _modules._reconstructor


class Driver(Protocol):
    """What turns a model's backward passes or steps into rounds."""

    def no_sync(self) -> AbstractContextManager[None]: ...

    def forward_begins(self) -> None:
        """A forward pass whose gradients will be wanted begins."""


def bare(model: nn.Module) -> nn.Module:
    """The module that is to be trained: without what `torch.compile` or another wrapper put around it."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        is_parallel = isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel)
        if is_parallel:
            inner = model.module
        if not isinstance(inner, nn.Module):
            break
        model = inner
    if is_wrapped(model):
        raise UsageError("this model is wrapped already", hint="call `wrap` once for each model")
    return model


def is_wrapped(model: nn.Module) -> bool:
    """Say whether a model, or the one that `torch.compile` was given, is a wrapped one."""
    return hasattr(type(getattr(model, "_orig_mod", model)), "_shoestring_plain")


Begins = Callable[[tuple[Any, ...], dict[str, Any]], None]


def put_on(model: nn.Module, driver: Driver, begins: Begins) -> None:
    """Make a model a wrapped one; `begins` hears of every training pass with its arguments."""
    plain = type(model)

    def see(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled():
            driver.forward_begins()
            if module.training:
                begins(args, kwargs)

    # Not traced: it counts, and a compiled model would be compiled anew at every count.
    untraced: Any = torch.compiler.disable
    hook = model.register_forward_pre_hook(untraced(see), with_kwargs=True)

    def reduce(self: Any, protocol: Any) -> Any:
        reduced: Any = _plain_twin(self, plain, hook.id).__reduce_ex__(protocol)
        made, arguments, *rest = reduced
        if made is _NEW and arguments == (plain,):  # a pickler wants the object's own class there
            made, arguments = _REBUILD, (plain, object, None)
        return made, arguments, *rest

    def fill(namespace: dict[str, Any]) -> None:
        namespace["__module__"], namespace["__qualname__"] = plain.__module__, plain.__qualname__
        namespace["__doc__"] = plain.__doc__
        namespace["_shoestring_plain"] = plain
        namespace["__reduce_ex__"] = reduce
        namespace["no_sync"] = lambda self: driver.no_sync()

    inner = types.new_class(plain.__name__, (plain,), exec_body=fill)
    if hasattr(model, "module"):
        model.__class__ = inner
        return
    # As in `DistributedDataParallel`: scripts look there. It is the same module, all attributes shared,
    # but has no `module` itself: some scripts ask until there is none.
    same: Any = plain.__new__(inner)
    object.__setattr__(same, "__dict__", model.__dict__)

    def fill_outer(namespace: dict[str, Any]) -> None:
        fill(namespace)
        namespace["module"] = property(lambda self: same)

    model.__class__ = types.new_class(plain.__name__, (inner,), exec_body=fill_outer)


def _plain_twin(model: nn.Module, plain: type[nn.Module], hook: int) -> nn.Module:
    """An object of the plain class with the same attributes, without the hook of the run."""
    twin = plain.__new__(plain)
    twin.__dict__.update(model.__dict__)
    for name in ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"):
        hooks = OrderedDict(twin.__dict__.get(name, {}))
        hooks.pop(hook, None)
        twin.__dict__[name] = hooks
    return twin
