"""Metrics of a run: console, files, and experiment trackers."""
