"""Parts whose parameters lie on a GPU: which are coded there, and on which streams.

A part is coded on its device if all of it lies on one, the codec is `dct` and Triton has
shown there that it decodes to the CPU's bits. Otherwise its values are copied to the host
and coded there, which gives the same bits and takes longer; why is said once for a device.

Pushes are encoded in the exchange's thread on streams of its own, after the kernels that
make the gradient and beside those that follow.
"""

import contextlib
import importlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from shoestring.codec.base import Codec, Layout
from shoestring.codec.dct.codec import Dct
from shoestring.compiled.scratch import owned

if TYPE_CHECKING:
    from shoestring.codec.dct.gpu import GpuDct, GpuFeedback

KINDS = ("cuda",)  # of devices on which parts can be coded

_CHECKED = Layout.of([(16, 8, 3, 3), (70, 33), (300,), (5,)])


def common_device(tensors: Sequence[Tensor]) -> torch.device | None:
    """The device that tensors may be coded on: where all of them lie, if it is of such a kind."""
    device = tensors[0].device
    if device.type in KINDS and all(tensor.device == device for tensor in tensors):
        return device
    return None


def gpu_feedback(layout: Layout, device: torch.device, values: Any = None) -> "GpuFeedback":
    """Feedback that lies on a device; `values` are what it holds, where they lay elsewhere before."""
    made: GpuFeedback = _gpu().GpuFeedback(layout, device, values)
    return made


class Ready:
    """When values on GPUs are there: noted by who makes them, waited for by who reads them."""

    def __init__(self) -> None:
        self._streams: set[torch.cuda.Stream] = set()
        self._events: list[tuple[torch.device, torch.cuda.Event]] = []

    def note(self, tensors: Iterable[Tensor]) -> None:
        """Remember the streams that this thread is working on, where these tensors lie."""
        devices = {tensor.device for tensor in tensors if tensor.is_cuda}
        self._streams.update(torch.cuda.current_stream(device) for device in devices)

    def close(self) -> None:
        """What has been started until now on those streams is what is waited for."""
        self._events = [(stream.device, stream.record_event()) for stream in self._streams]

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """Do what follows on streams of this thread's own, when the values are there."""
        with contextlib.ExitStack() as streams:
            for device in {device for device, _ in self._events}:
                streams.enter_context(torch.cuda.stream(_own_stream(device)))
            for device, event in self._events:
                torch.cuda.current_stream(device).wait_event(event)
            yield


class GpuCodecs:
    """Finds the codec of a part on a GPU. Any thread may ask; the first to do so compiles kernels."""

    def __init__(self, layouts: Iterable[Layout], notice: Callable[[str], None]) -> None:
        self._layouts = tuple(dict.fromkeys(layouts))
        self._notice = notice
        self._usable: dict[torch.device, bool] = {}
        self._made: dict[tuple[str, torch.device], GpuDct] = {}
        self._lock = threading.Lock()

    def find(self, codec: Codec, device: torch.device | None) -> "GpuDct | None":
        """The same codec for tensors on a device; None if they are to be coded on the host."""
        if device is None or not isinstance(codec, Dct):
            return None
        with self._lock:
            if device not in self._usable:
                problem = self._try(device)
                self._usable[device] = not problem
                if problem:
                    self._notice(f"gradients on `{device}` are compressed on the CPU: {problem}")
            if not self._usable[device]:
                return None
            key = codec.spec, device
            if key not in self._made:
                if len(self._made) > 256:  # `auto` names ever new budgets
                    self._made.clear()
                self._made[key] = _gpu().GpuDct(**asdict(codec.options))
            return self._made[key]

    def _try(self, device: torch.device) -> str:
        """Compile the kernels and hold them to the CPU's bits; say what is wrong, if anything is."""
        try:
            gpu = _gpu()
            with on(device):
                if not _decodes_alike(gpu, device):
                    return "its results differ from the CPU's"
                if device.type == "cuda":
                    for layout in self._layouts:
                        _rehearse(gpu, layout, device)
        except ImportError as error:
            return f"{error}; install `triton` to compress them on the GPU"
        except Exception as error:  # a compiler that does not know the device fails in many ways
            return f"{type(error).__name__}: {error}"
        return ""


def on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Make a device the one that kernels are launched on."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def to_stderr(text: str) -> None:
    print(f"shoestring: {text}", file=sys.stderr, flush=True)


def _gpu() -> Any:
    return importlib.import_module("shoestring.codec.dct.gpu")  # when a GPU is there: it imports Triton


def _own_stream(device: torch.device) -> torch.cuda.Stream:
    make: Callable[[torch.device], torch.cuda.Stream] = torch.cuda.Stream
    return owned(f"stream of {device}", lambda: make(device))


def _random(layout: Layout) -> Tensor:
    return torch.from_numpy(np.random.default_rng(0).laplace(size=layout.total).astype(np.float32))


def _decodes_alike(gpu: Any, device: torch.device) -> bool:
    came_in = _random(_CHECKED).to(device)
    left_over, sent = torch.empty_like(came_in), torch.zeros_like(came_in)
    payload = gpu.GpuDct(step=1.0).encode(came_in, _CHECKED, left_over)
    gpu.GpuDct().decode(payload, _CHECKED, sent, 1.0)
    want = np.zeros(_CHECKED.total, np.float32)
    Dct().decode(payload.numpy(), _CHECKED, want)
    got, left = sent.cpu().numpy(), left_over.cpu().numpy()
    is_whole = (got + left == got.astype(np.float64) + left).all()
    return bool((got == want).all() and is_whole)


def _rehearse(gpu: Any, layout: Layout, device: torch.device) -> None:
    """Have all that a layout needs compiled, so that no push waits for it."""
    came_in = _random(layout).to(device)
    left_over, sent = torch.empty_like(came_in), torch.zeros_like(came_in)
    for transform in ("always", "never"):
        codec = gpu.GpuDct(transform=transform)
        codec.decode(codec.encode(came_in, layout, left_over), layout, sent, 1.0)
