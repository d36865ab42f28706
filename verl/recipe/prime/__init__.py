"""PRIME: token rewards from an implicit process reward model that is trained online on outcomes."""

from verl.utils.lazy import lazy_names

_HOME = dict.fromkeys(("RECIPE", "PRIMETrainer", "LocalPRIMETrainer"), "verl.recipe.prime.main_prime")

__all__ = list(_HOME)

__getattr__, __dir__ = lazy_names(__name__, _HOME)
