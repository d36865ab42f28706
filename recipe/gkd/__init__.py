"""GKD: the policy learns from the token distributions of a teacher, on its own responses."""

from verl.utils.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__, {"verl.recipe.gkd.main_gkd": "GKDTrainer"})
