"""What both sides know of a model: its tensors, the parts that travel, its layers, and rules by name."""
