"""Hosts joined by links of a rate and a delay: network namespaces on this machine."""
