"""Parallel training on Ray Train."""
