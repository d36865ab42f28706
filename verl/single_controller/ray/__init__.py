"""Worker groups of Ray actors."""

from verl.compat.hook import published_names


def __getattr__(name: str):
    return published_names(__name__)(name)
