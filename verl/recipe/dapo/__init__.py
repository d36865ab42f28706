"""DAPO: clip-higher, dynamic sampling, token-level loss, soft overlong penalty."""

from verl.utils.lazy import lazy_names

_HOME = dict.fromkeys(("RECIPE", "DAPOTrainer", "LocalDAPOTrainer"), "verl.recipe.dapo.main_dapo")

__all__ = list(_HOME)

__getattr__, __dir__ = lazy_names(__name__, _HOME)
