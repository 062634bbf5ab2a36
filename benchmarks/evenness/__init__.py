"""How evenly shards share the values of known models."""
