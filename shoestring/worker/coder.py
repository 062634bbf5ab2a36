"""Turn the values of a part into a push, and the answer to it into values, losing nothing on the way.

What a lossy codec leaves out of a push is the part's feedback; it is added to the next push. A
lossless push carries the feedback as well; then none is left and no memory is used for it. Where a
part is coded on a GPU, its feedback lies there too.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoestring.codec.base import Codec, Payload, Vector, refuse_non_finite
from shoestring.codec.feedback import Feedback
from shoestring.codec.registry import LOSSLESS, codec_of, make
from shoestring.compiled.scratch import room
from shoestring.errors import NonFiniteError
from shoestring.model.parts import Part, pack_used
from shoestring.model.precision import Precision
from shoestring.wire import messages as say
from shoestring.wire.messages import WHOLE_ROUND, Decisions
from shoestring.worker.batchnorm.statistics import SharedStatistics
from shoestring.worker.exchange import Exchange
from shoestring.worker.module.buffers import SharedBuffers
from shoestring.worker.protocol.worker import Answer, Give, nothing
from shoestring.worker.replica.device import GpuCodecs, Ready, gpu_feedback, on, to_stderr
from shoestring.worker.replica.rounding import rounded

if TYPE_CHECKING:
    from shoestring.codec.dct.gpu import GpuDct, GpuFeedback

Used = NDArray[np.bool_]  # which pieces of a part have values at all


class Source(Protocol):
    """The values of one part that are to be pushed. The feedback, where given, is added to them."""

    @property
    def device(self) -> torch.device | None:
        """The GPU on which all values lie, so that they may be coded there; none: on the host."""

    @property
    def ready(self) -> Ready | None:
        """When the values on GPUs are computed; none: they lie on the host."""

    def read(self, memory: Vector | None, feedback: Vector | None) -> tuple[Vector, Used]:
        """Copy them to the host, into the memory given if any."""

    def gather(self, feedback: Tensor | None) -> tuple[Tensor, Used]:
        """Copy them into one vector on `device`."""


class Target(Protocol):
    """Where answers go. What `on_host` and `on_device` give may be changed; it counts when they end."""

    def device_of(self, part: Part) -> torch.device | None: ...

    def expect(self, part: Part, used: bytes) -> None:
        """Take note of the pieces that had a gradient, where the answer that follows is a mean."""

    def write(self, part: Part, values: Vector) -> None: ...

    def on_host(self, part: Part) -> AbstractContextManager[Vector]: ...

    def on_device(self, part: Part) -> AbstractContextManager[Tensor]: ...


@dataclass(frozen=True)
class Setting:
    """How a round travels."""

    push: str = LOSSLESS
    reply: str = LOSSLESS
    reply_cost: float = 32.0  # of several workers' wishes the cheapest is granted

    @cached_property
    def codec(self) -> Codec:
        """The codec of pushes."""
        return codec_of(self.push)


@dataclass(frozen=True)
class Terms:
    """What goes with every push of a round."""

    seq: int
    setting: Setting
    hyper: list[list[float]]
    weight: float = 1.0
    bound: int = WHOLE_ROUND
    save: bool = False
    decisions: Decisions | None = None  # with the push of the first part
    early: bool = False  # values are pushed before it is known whether the step is taken
    skip: bool = False  # values are not finite


@dataclass(frozen=True)
class Coded:
    """What a push says of its part's values."""

    codec: str
    payload: Payload
    used: Used
    slot: int = -1  # of shared memory, where the values are there and not in the payload
    is_skipped: bool = False
    fates: bytes = b""  # where workers update: what became of the gradients of the round before


@dataclass(frozen=True)
class Extra:
    """What travels with the push of one part of a round."""

    checksums: Callable[[], bytes] = bytes  # of parameters; called where the values are read
    commit: say.Commit | None = None  # whether it is to be skipped is found out on the way
    give: Give = nothing  # what the script has set, for shards that ask


class PartCoder:
    """Encodes, sends, receives and decodes the parts of one replica."""

    def __init__(
        self,
        exchange: Exchange,
        parts: Sequence[Part],
        statistics: SharedStatistics,
        notice: Callable[[str], None] = to_stderr,
        precisions: Sequence[Precision] = (),
        buffers: SharedBuffers | None = None,
        keeps: bool = True,
    ) -> None:
        self.exchange = exchange
        self.parts = tuple(parts)
        self.notice = notice
        narrow = (precision.is_narrow for precision in precisions)
        self._narrow = {index: precisions[index] for index, is_narrow in enumerate(narrow) if is_narrow}
        self.statistics = statistics
        self._buffers = buffers
        self._keeps = keeps  # what a codec leaves out of a push
        self._gpu = GpuCodecs([part.layout for part in parts], notice)
        self._feedback: list[Feedback | GpuFeedback | None] = [None] * len(parts)
        self._weights = [1.0] * len(parts)  # of the last push of each
        self._skipped: deque[tuple[int, str]] = deque()
        self._not_finite: deque[int] = deque(maxlen=4)  # rounds with a push that was not
        self.is_skipped = False  # whether the round was whose answers came in last

    def take_skipped(self) -> list[tuple[int, str]]:
        """The pushes that were not finite since the last call, as (round, what)."""
        return [self._skipped.popleft() for _ in range(len(self._skipped))]

    def push(self, part: Part, terms: Terms, source: Source, extra: "Extra | None" = None) -> None:
        """Send one part; its values are read soon, in another thread."""
        statistics = b""
        if self.statistics.is_on:
            statistics = self.statistics.take(part.index, terms.seq, terms.weight)
        news = b""
        if self._buffers is not None and part.index in self._buffers.of_part:
            news = self._buffers.take(part.index)
        gpu, device = None, source.device
        if device is not None:
            # Here and not there: kernels may have to be compiled, and that thread must answer in time.
            gpu = self._gpu.find(terms.setting.codec, device)
        extra = extra or Extra()
        encode = partial(self._encode, part, terms, source, gpu, statistics, news, extra)
        self.exchange.submit(part.index, encode, extra.give)

    def collect(self, seq: int, target: Target, *, is_whole: bool = True) -> Decisions | None:
        """Wait for a round, and bring the target up to date with it; return what was decided."""
        decisions: Decisions | None = None
        self.is_skipped = not self.is_finite(seq)

        def take(answer: Answer) -> None:
            nonlocal decisions
            part, message = self.parts[answer.message.part], answer.message
            decisions = message.decisions or decisions
            self.is_skipped |= message.skip and is_whole  # else it may be another worker's
            if message.statistics:
                self.statistics.hear(part.index, message.version, seq, message.statistics, is_whole=is_whole)
            if message.news and self._buffers is not None:
                self._buffers.hear(part.index, message.news)
            target.expect(part, message.used)
            if isinstance(message, say.Full):
                narrow, payload = self._narrow.get(part.index), answer.payload
                if narrow is None:
                    is_wide = payload.nbytes == 8 * part.size  # of a mean of float64 values
                    values: Vector = np.frombuffer(payload, "float64" if is_wide else "float32")
                else:
                    values = narrow.unpack(payload)
                target.write(part, values)
            elif message.codec:
                self._add(target, part, codec_of(message.codec), answer.payload)

        self.exchange.collect(seq, take)
        if self.is_skipped:
            self.forget()  # it is of gradients that nobody has taken; they may be large
        return decisions

    def forget(self) -> None:
        """Drop all feedback."""
        self._feedback = [None] * len(self.parts)

    def is_finite(self, seq: int) -> bool:
        """Whether all pushes of round `seq`, one of the last, are finite; after `exchange.wait_sent`."""
        return seq not in self._not_finite

    def lend(self, part: Part, target: Target) -> None:
        """Add the feedback of a part to its parameters; what they cannot hold of the sum stays feedback."""
        feedback, narrow = self._feedback[part.index], self._narrow.get(part.index)
        if isinstance(feedback, Feedback):
            with target.on_host(part) as values:
                feedback.lend(values)
                if narrow is not None:
                    exact = values.copy()
                    narrow.round(values)
                    feedback.add(exact - values)
        elif feedback is not None:
            with on(feedback.device), target.on_device(part) as own:
                feedback.lend(own)
                if narrow is not None:
                    held = rounded(own, narrow)
                    feedback.add(own - held)
                    own.copy_(held)

    def state(self) -> dict[str, NDArray[Any]]:
        """The feedback of all parts, and this worker's share of statistics, for a checkpoint."""
        feedback = {
            f"kept.{index:05d}": np.array(feedback.kept)
            for index, feedback in enumerate(self._feedback)
            if feedback is not None
        }
        return feedback | {"weights": np.array(self._weights)} | self.statistics.state()

    def load(self, state: dict[str, NDArray[Any]]) -> None:
        self.statistics.load(state)
        weights = state.get("weights")
        if weights is not None and weights.shape == (len(self.parts),):
            self._weights = weights.tolist()
        for part in self.parts:
            vector = state.get(f"kept.{part.index:05d}")
            if vector is not None:
                self._feedback[part.index] = _on_host(part, vector)

    def _add(self, target: Target, part: Part, codec: Codec, payload: memoryview) -> None:
        device = target.device_of(part)
        gpu = self._gpu.find(codec, device)
        if gpu is None or device is None:
            with target.on_host(part) as values:
                codec.decode(payload, part.layout, values, 1.0)
            return
        with on(device), target.on_device(part) as own:
            gpu.decode(payload, part.layout, own, 1.0)

    def _encode(
        self,
        part: Part,
        terms: Terms,
        source: Source,
        gpu: "GpuDct | None",
        statistics: bytes,
        news: bytes,
        extra: "Extra",
    ) -> tuple[say.Push, memoryview]:
        with nullcontext() if source.ready is None else source.ready.beside():
            self._weigh(part, terms.weight)
            coded = self._nothing(part, terms) if terms.skip else self._code(part, terms, source, gpu)
            sums = extra.checksums()
        push = say.Push(
            part=part.index,
            seq=terms.seq,
            weight=terms.weight,
            codec=coded.codec,
            reply=terms.setting.reply,
            reply_cost=terms.setting.reply_cost,
            hyper=terms.hyper,
            used=b"" if coded.used.all() else pack_used(coded.used),
            bound=terms.bound,
            skip=coded.is_skipped,
            early=terms.early,
            save=terms.save,
            slot=coded.slot,
            statistics=statistics,
            decisions=terms.decisions if part.index == 0 else None,
            fates=coded.fates,
            news=news,
            checksums=sums,
            commit=extra.commit,
        )
        if extra.commit is not None:  # the last of the round: all others have been coded
            extra.commit.skip |= not self.is_finite(terms.seq)
        return push, memoryview(b"") if coded.slot >= 0 else coded.payload.data

    def _code(self, part: Part, terms: Terms, source: Source, gpu: "GpuDct | None") -> "Coded":
        codec, slot, is_skipped = terms.setting.codec, -1, False
        if gpu is not None and source.device is not None:
            encode, used = self._encoding_there(part, source, source.device, gpu)
        else:
            slot, memory = self._memory(part, codec)
            here = self._feedback_here(part)
            with np.errstate(over="ignore", invalid="ignore"):  # the codec refuses what becomes of it
                values, used = source.read(memory, None if here is None else here.waiting)
            encode = partial(self._encode_values, part, codec, values)
        try:
            payload = encode()
        except NonFiniteError as error:
            slot, is_skipped = -1, True
            payload = np.empty(0, np.uint8)
            if self.is_finite(terms.seq):
                self._not_finite.append(terms.seq)
            self._skipped.append((terms.seq, f"part {part.index}: {error.message}"))
        return Coded(terms.setting.push, payload, used, slot, is_skipped)

    def _encoding_there(
        self, part: Part, source: Source, device: torch.device, gpu: "GpuDct"
    ) -> tuple[Callable[[], Payload], Used]:
        """What encodes a part on the GPU on which it lies."""
        if not self._keeps:
            gathered, used = source.gather(None)
            return lambda: gpu.encode(gathered, part.layout).numpy(), used
        there = self._feedback_there(part, device)
        gathered, used = source.gather(there.waiting)
        return partial(there.encode_total, gpu, gathered), used

    def _nothing(self, part: Part, terms: Terms) -> "Coded":
        """What is said of a part in a round that this worker skips as a whole."""
        if self.is_finite(terms.seq):
            self._not_finite.append(terms.seq)
            self._skipped.append((terms.seq, "NaN or infinity in what the parameters moved by"))
        used = np.ones(len(part.pieces), bool)
        return Coded(terms.setting.push, np.empty(0, np.uint8), used, is_skipped=True)

    def _weigh(self, part: Part, weight: float) -> None:
        """Scale the feedback of a part, so that it counts in this push as it would have in its own."""
        feedback = self._feedback[part.index]
        if feedback is not None and weight != self._weights[part.index]:
            feedback.scale(self._weights[part.index] / weight)
        self._weights[part.index] = weight

    def _memory(self, part: Part, codec: Codec) -> tuple[int, Vector | None]:
        """Memory to read a part into: a slot that is shared with the shard, or this thread's own."""
        if codec.name != LOSSLESS:
            return -1, room("pushed", part.size, np.float32)[: part.size]
        return self.exchange.free_slot(part.index) or (-1, None)

    def _feedback_here(self, part: Part) -> Feedback | None:
        """The feedback of a part, brought to the host if it lies elsewhere."""
        feedback = self._feedback[part.index]
        if feedback is not None and not isinstance(feedback, Feedback):
            feedback = self._feedback[part.index] = _on_host(part, feedback.kept)
        return feedback

    def _feedback_there(self, part: Part, device: torch.device) -> "GpuFeedback":
        """The feedback of a part, brought to a device if it lies elsewhere."""
        feedback = self._feedback[part.index]
        if feedback is None or isinstance(feedback, Feedback) or feedback.device != device:
            values = None if feedback is None else feedback.kept
            feedback = self._feedback[part.index] = gpu_feedback(part.layout, device, values)
        return feedback

    def _encode_values(self, part: Part, codec: Codec, values: Vector) -> Payload:
        feedback = self._feedback_here(part)
        if codec.name == LOSSLESS:
            with np.errstate(over="ignore", invalid="ignore"):
                is_finite = math.isfinite(float(values.sum()))  # cheap; a sum may overflow, so look closer
            if not is_finite:
                refuse_non_finite(values, part.layout)
            self._feedback[part.index] = None
            return values.view(np.uint8)
        if not self._keeps:
            return codec.encode(values, part.layout)
        if feedback is None:
            feedback = self._feedback[part.index] = Feedback(codec, part.layout)
        feedback.codec = codec
        return feedback.encode_total(values)


def _on_host(part: Part, values: Vector) -> Feedback:
    feedback = Feedback(make(LOSSLESS), part.layout)
    feedback.load({"kept": values})
    return feedback
