"""Data sets: where their files are, and images as tensors."""
