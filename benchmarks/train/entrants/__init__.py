"""The ways to train on several hosts that are compared, one module each: ours and others'."""
