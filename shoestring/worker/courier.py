"""Bring values to the shards and answers back, losing nothing on the way.

What a lossy codec leaves out of a push is kept, part by part, and added to the next one.
A lossless push carries what was kept as well; then nothing is kept and no memory is used
for it.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoestring.codec.base import Codec, Payload, Vector, refuse_non_finite
from shoestring.codec.feedback import Feedback
from shoestring.codec.registry import make
from shoestring.codec.scratch import room
from shoestring.errors import NonFiniteError
from shoestring.server.admission import codec_of
from shoestring.server.desk import pack_used
from shoestring.server.holding import LOSSLESS
from shoestring.server.partition import Part
from shoestring.wire import messages as say
from shoestring.wire.messages import WHOLE_ROUND
from shoestring.worker.exchange import Answer, Exchange
from shoestring.worker.statistics import SharedStatistics

# Reads into the memory given, if any, and adds what was kept, if any; says which pieces are used.
Read = Callable[[Vector | None, Vector | None], tuple[Vector, NDArray[np.bool_]]]


@dataclass(frozen=True)
class Setting:
    """How a round travels."""

    push: str = LOSSLESS
    reply: str = LOSSLESS
    reply_cost: float = 32.0  # of several workers' wishes the cheapest is granted


@dataclass(frozen=True)
class Terms:
    """What goes with every push of a round."""

    seq: int
    setting: Setting
    hyper: list[list[float]]
    weight: float = 1.0
    bound: int = WHOLE_ROUND
    save: bool = False
    plan: str = ""
    pace: float = 0.0


@dataclass(frozen=True)
class Heard:
    """What the answers to a round say besides parameters."""

    plan: str = ""  # of the first worker
    paces: tuple[float, ...] = ()  # of all workers


class Courier:
    """Encodes, sends, receives and decodes the parts of one replica."""

    def __init__(
        self, exchange: Exchange, parts: Sequence[Part], incarnation: int, statistics: SharedStatistics
    ) -> None:
        self.exchange = exchange
        self.parts = tuple(parts)
        self.statistics = statistics
        self._incarnation = incarnation
        self._feedback: list[Feedback | None] = [None] * len(parts)
        self._weights = [1.0] * len(parts)  # of the last push of each
        self._skipped: deque[tuple[int, str]] = deque()

    def take_skipped(self) -> list[tuple[int, str]]:
        """The pushes that were not finite since the last call, as (round, what)."""
        return [self._skipped.popleft() for _ in range(len(self._skipped))]

    def push(self, part: Part, terms: Terms, read: Read) -> None:
        """Send one part; `read` gives its values and is called soon, in another thread."""
        statistics = self.statistics.take(part.index, terms.seq, terms.weight)
        self.exchange.submit(part.index, terms.seq, lambda: self._encode(part, terms, read, statistics))

    def collect(
        self,
        seq: int,
        apply: Callable[[Part, Vector, bool], None],
        home: Callable[[Part], Vector | None],
        *,
        is_whole: bool = True,
    ) -> Heard:
        """Wait for a round; call `apply(part, values, is_full)` for each change of it.

        Where `home` gives the memory of a part, changes are added to it without `apply`.
        """
        plan = ""
        paces: tuple[float, ...] = ()

        def take(answer: Answer) -> None:
            nonlocal plan, paces
            part, message = self.parts[answer.part], answer.message
            plan, paces = message.plan or plan, tuple(message.paces) or paces
            self.statistics.hear(part.index, message.version, seq, message.statistics, is_whole=is_whole)
            if isinstance(message, say.Full):
                apply(part, np.frombuffer(answer.payload, np.float32), True)
            elif message.codec and (own := home(part)) is not None:
                codec_of(message.codec).decode(answer.payload, part.layout, own, 1.0)
            elif message.codec:
                values = room("answered", part.size, np.float32)[: part.size]
                codec_of(message.codec).decode(answer.payload, part.layout, values)
                apply(part, values, False)

        self.exchange.collect(seq, take)
        return Heard(plan, paces)

    def kept(self) -> dict[str, NDArray[Any]]:
        """What has not been sent yet, and this worker's share of statistics, for a checkpoint."""
        kept = {
            f"kept.{index:05d}": np.array(feedback.kept)
            for index, feedback in enumerate(self._feedback)
            if feedback is not None
        }
        return kept | {"weights": np.array(self._weights)} | self.statistics.state()

    def load_kept(self, state: dict[str, NDArray[Any]]) -> None:
        self.statistics.load(state)
        weights = state.get("weights")
        if weights is not None and weights.shape == (len(self.parts),):
            self._weights = weights.tolist()
        for part in self.parts:
            vector = state.get(f"kept.{part.index:05d}")
            if vector is not None:
                feedback = Feedback(make(LOSSLESS), part.layout)
                feedback.load({"kept": vector})
                self._feedback[part.index] = feedback

    def _encode(
        self, part: Part, terms: Terms, read: Read, statistics: bytes
    ) -> tuple[say.Push, bytes | memoryview]:
        codec = codec_of(terms.setting.push)
        slot, memory = -1, None
        if codec.name != LOSSLESS:
            memory = room("pushed", part.size, np.float32)[: part.size]
        elif (shared := self.exchange.room(part.index)) is not None:
            slot, memory = shared
        feedback = self._feedback[part.index]
        if feedback is not None and terms.weight != self._weights[part.index]:
            # What was kept is to count as it would have counted then.
            feedback.scale(self._weights[part.index] / terms.weight)
        self._weights[part.index] = terms.weight
        with np.errstate(over="ignore", invalid="ignore"):  # the codec refuses what becomes of it
            values, used = read(memory, None if feedback is None else feedback.waiting)
        is_finite = True
        try:
            payload = self._encode_values(part, codec, values)
        except NonFiniteError as error:
            is_finite = False
            payload = np.empty(0, np.uint8)
            self._skipped.append((terms.seq, f"part {part.index}: {error.message}"))
        push = say.Push(
            part.index,
            self._incarnation,
            terms.seq,
            self.exchange.have(part.index),
            terms.weight,
            codec.spec,
            terms.setting.reply,
            terms.setting.reply_cost,
            terms.hyper,
            pack_used(used),
            terms.bound,
            not is_finite,
            terms.save,
            terms.plan,
            slot if is_finite else -1,
            statistics,
            terms.pace if part.index == 0 else 0.0,
        )
        return push, b"" if push.slot >= 0 else payload.data

    def _encode_values(self, part: Part, codec: Codec, values: Vector) -> Payload:
        feedback = self._feedback[part.index]
        if codec.name == LOSSLESS:
            if not math.isfinite(float(values.sum())):  # cheap; a sum may overflow, so look closer
                refuse_non_finite(values, part.layout)
            self._feedback[part.index] = None
            return values.view(np.uint8)
        if feedback is None:
            feedback = self._feedback[part.index] = Feedback(codec, part.layout)
        feedback.codec = codec
        return feedback.encode_total(values)
