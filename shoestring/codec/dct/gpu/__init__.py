"""The codec `dct` on CUDA tensors, in Triton. Imports torch; nothing else in `codec` does."""

from shoestring.codec.dct.gpu.codec import GpuDct
from shoestring.codec.dct.gpu.feedback import GpuFeedback

__all__ = ["GpuDct", "GpuFeedback"]
