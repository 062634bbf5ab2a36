"""A slow link in user space, and the hosts and processes of a measurement."""
