"""SPIN: self-play, in which the policy learns to prefer better responses over its own."""

from verl.utils.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__, {"verl.recipe.spin.main_spin": "SPINTrainer"})
