"""A real fleet: decide, start, stop and resume jobs, remember and explain."""
