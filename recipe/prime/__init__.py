"""PRIME: token rewards from an implicit process reward model that is trained online on outcomes."""

from verl.utils.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__, {"verl.recipe.prime.main_prime": "PRIMETrainer LocalPRIMETrainer"})
