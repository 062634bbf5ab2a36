"""Bytes between workers and shards: messages, frames, keys, sockets."""
