"""Which samples a worker trains on, and how they reach its device."""
