"""What sharing BatchNorm statistics buys, and what it costs."""
