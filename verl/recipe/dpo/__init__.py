"""DPO: preference pairs of two responses to a prompt, chosen by reward or given in a file."""

import importlib

_HOME = dict.fromkeys(("RECIPE", "DPOTrainer", "LocalDPOTrainer"), "verl.recipe.dpo.main_dpo")

__all__ = list(_HOME)


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
