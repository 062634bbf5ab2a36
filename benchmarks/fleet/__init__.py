"""Decisions of the fleet, and real runs of one."""
