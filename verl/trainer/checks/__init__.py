"""Checks before the first step."""
