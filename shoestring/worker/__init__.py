"""What a training script touches. Needs torch."""
