"""DAPO: clip-higher, dynamic sampling, token-level loss, soft overlong penalty."""

import importlib

_HOME = dict.fromkeys(("RECIPE", "DAPOTrainer", "LocalDAPOTrainer"), "verl.recipe.dapo.main_dapo")

__all__ = list(_HOME)


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
