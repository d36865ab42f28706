"""Checks of several settings together, by subject."""
