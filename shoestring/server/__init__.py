"""One shard: what it holds, how it sums and updates, and the process around it."""
