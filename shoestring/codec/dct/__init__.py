"""Gradients as quantised cosine coefficients. README.md beside this file is the specification."""

from shoestring.codec.dct.codec import Dct

__all__ = ["Dct"]
