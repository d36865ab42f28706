"""Helpers without a subject of their own: devices, random states, logging, locks, disk space, balancing."""
