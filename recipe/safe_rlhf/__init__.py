"""Safe RLHF: a reward to maximize under a limit on a cost, by a Lagrange multiplier."""

from verl.utils.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__, {"verl.recipe.safe_rlhf.main_safe_rlhf": "SafeRLHFTrainer"})
