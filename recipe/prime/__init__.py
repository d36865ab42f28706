"""PRIME: token rewards from an implicit process reward model that is trained online on outcomes."""

from verl.utils.lazy import lazy_names

_HOME = {"verl.recipe.prime.main_prime": "PRIMETrainer LocalPRIMETrainer"}

__all__, __getattr__, __dir__ = lazy_names(__name__, _HOME)
