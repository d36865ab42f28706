"""Utilities: devices, RNG states, logging, locks, disk space, load balancing."""
