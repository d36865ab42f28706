"""Reward models: a sequence classifier that learns scores from preference pairs."""

from verl.utils.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__, {"verl.recipe.rm.trainer": "RMTrainer"})
