"""What `wrap` makes of a script's module: its class, its buffers, and what all workers start from."""
