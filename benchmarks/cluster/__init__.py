"""What needs a Ray cluster."""
