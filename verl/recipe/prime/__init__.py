"""PRIME: token rewards from an implicit process reward model that is trained online on outcomes."""

import importlib

_HOME = dict.fromkeys(("RECIPE", "PRIMETrainer", "LocalPRIMETrainer"), "verl.recipe.prime.main_prime")

__all__ = list(_HOME)


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
