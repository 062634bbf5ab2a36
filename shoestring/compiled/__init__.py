"""How kernels are compiled, cached on disk, and run on several threads."""
