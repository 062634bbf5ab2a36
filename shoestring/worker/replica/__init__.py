"""The model's parameters on this worker: as parts, on devices, rounded to what they are made of."""
