"""Exploration by a bonus for responses whose representations differ from those of their group."""

from verl.utils.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__, {"verl.recipe.rep_exp.main_rep_exp": "RepExpTrainer"})
