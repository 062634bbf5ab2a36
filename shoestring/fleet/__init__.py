"""Several jobs on unequal devices: what fits where, what goes where, and why."""
