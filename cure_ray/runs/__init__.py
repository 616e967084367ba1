"""A run on disk: directory, checkpoints, metrics, and what is said while it goes on."""
