"""The entropy mechanism: policy losses that keep the entropy up, Clip-Cov and KL-Cov."""

from verl.utils.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__, {"verl.recipe.entropy.main_entropy": "EntropyTrainer"})
