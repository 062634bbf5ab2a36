"""Which job runs where: what the allocator is told, how it chooses, and which devices each placement gets."""
