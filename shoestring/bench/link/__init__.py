"""Emulated links and hosts to measure over."""
