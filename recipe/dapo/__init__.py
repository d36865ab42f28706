"""DAPO: clip-higher, dynamic sampling, token-level loss, soft overlong penalty."""

from verl.utils.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__, {"verl.recipe.dapo.main_dapo": "DAPOTrainer LocalDAPOTrainer"})
