"""The Numba backend of `dct`."""
