"""Recorded jobs through the same decisions, without a device."""
