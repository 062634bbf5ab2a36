"""Checkpoints: their files, who writes them, which one a run goes on from, and export."""
