"""Measure what the parts of Shoestring cost and save on this machine.

A benchmark refuses to time what is not correct, and names the machine it ran on.
Absolute figures hold for that machine and its load; ratios travel.
"""
