"""Rounds of 8 to 10,000 workers, by a model that real runs calibrate."""
