"""Data-parallel training on process groups of any backend."""
