"""Emulated links and hosts to measure over, and the processes of a measurement."""
