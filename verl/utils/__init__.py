"""Utilities: devices, RNG states, logging, locks, disk space, load balancing."""

from verl.compat.hook import published_names


def __getattr__(name: str):
    return published_names(__name__)(name)
