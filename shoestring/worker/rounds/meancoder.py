"""Code gradients whose mean goes back to the workers.

As `PartCoder`, but nothing is skipped and nothing comes back that was thrown away: a gradient that is not
finite is pushed as it is, in float32 and without feedback, so that all workers see what one of them
has; feedback follows the fates of the gradients it is from.
"""

from typing import TYPE_CHECKING

import numpy as np

from shoestring.codec.base import Payload
from shoestring.codec.feedback import Feedback
from shoestring.codec.registry import LOSSLESS, make
from shoestring.compiled.scratch import room
from shoestring.errors import NonFiniteError
from shoestring.model.parts import Part
from shoestring.wire.messages import WIDE
from shoestring.worker.coder import Coded, PartCoder, Source, Terms
from shoestring.worker.rounds.means import MeanGradient

if TYPE_CHECKING:
    from shoestring.codec.dct.gpu import GpuDct

_NOTHING: Payload = np.empty(0, np.uint8)


class MeanCoder(PartCoder):
    """Encodes the parts of one replica's gradients."""

    def _code(self, part: Part, terms: Terms, source: Source, gpu: "GpuDct | None") -> Coded:
        if not isinstance(source, MeanGradient):
            raise TypeError(f"a mean of {type(source).__name__}")
        feedback = self._feedback[part.index]
        if feedback is not None:
            feedback.settle(source.fates)
        if source.is_empty:
            return Coded("", _NOTHING, source.used, fates=source.fates)
        if feedback is None and terms.setting.push == LOSSLESS and source.is_wide:
            return Coded(WIDE, source.read_wide().view(np.uint8), source.used, fates=source.fates)
        if feedback is None and terms.setting.push == LOSSLESS:
            slot, memory = self._memory(part, terms.setting.codec)
            values, used = source.read(memory, None)
            return Coded(LOSSLESS, values.view(np.uint8), used, slot, fates=source.fates)
        try:
            payload = self._encode_mean(part, terms, source, gpu)
        except NonFiniteError:
            values, used = source.read(None, None)
            return Coded(LOSSLESS, values.view(np.uint8), used, fates=source.fates)
        return Coded(terms.setting.push, payload, source.used, fates=source.fates)

    def _encode_mean(self, part: Part, terms: Terms, source: MeanGradient, gpu: "GpuDct | None") -> Payload:
        is_new = self._feedback[part.index] is None
        if gpu is not None and source.device is not None:
            there = self._feedback_there(part, source.device)
            if is_new:
                there.settle(b"")
            gathered, _ = source.gather(there.waiting)
            return there.encode_total(gpu, gathered, source.spared)
        here = self._feedback_here(part)
        if here is None:
            here = self._feedback[part.index] = Feedback(make(LOSSLESS), part.layout)
            here.settle(b"")
        with np.errstate(over="ignore", invalid="ignore"):  # the codec refuses what becomes of it
            values, _ = source.read(room("pushed", part.size, np.float32)[: part.size], here.waiting)
        here.codec = terms.setting.codec
        return here.encode_total(values, source.spared)
