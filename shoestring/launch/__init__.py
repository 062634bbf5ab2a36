"""Start a run's processes, or find out which run this process was started in."""
