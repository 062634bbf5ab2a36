"""Shoestring inside other libraries: one file each, which needs that library."""
