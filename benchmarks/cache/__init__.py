"""Two jobs on one dataset, with and without a shared cache."""
