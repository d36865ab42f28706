"""DAPO: clip-higher, dynamic sampling, token-level loss, soft overlong penalty."""

from recipe.dapo.trainer import LocalDAPOTrainer

__all__ = ["LocalDAPOTrainer"]
