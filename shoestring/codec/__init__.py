"""Gradients to bytes and back: codecs, their registry, and what was not sent yet."""
