"""Studies and comparisons with others, one folder a question. Run them from a clone."""
