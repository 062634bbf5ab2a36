"""Scripts as people write them, under DDP and under Shoestring."""
