"""What devices can do and what jobs cost on them."""
