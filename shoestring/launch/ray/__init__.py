"""Run a script's workers and shards on a Ray cluster."""
