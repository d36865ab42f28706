"""DPO: preference pairs of two responses to a prompt, chosen by reward or given in a file."""

from verl.utils.lazy import lazy_names

_HOME = {"verl.recipe.dpo.main_dpo": "RECIPE DPOTrainer LocalDPOTrainer"}

__all__, __getattr__, __dir__ = lazy_names(__name__, _HOME)
