"""What the transform of `dct` buys."""
