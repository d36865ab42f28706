"""Offline generation, scoring and reports."""
