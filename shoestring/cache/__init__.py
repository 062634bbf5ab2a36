"""Decoded samples in the host's memory, shared by all jobs of the host."""
