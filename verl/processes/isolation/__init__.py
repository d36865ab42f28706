"""Isolation of untrusted programs: see `program`."""
