"""Programs that are no workers: they read a run's parameters."""
