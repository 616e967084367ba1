"""Trials of a search on Ray Tune."""
