"""Preference optimization (DPO, IPO, KTO, SimPO, ORPO): preferences of a file, or by reward between own responses."""

from verl.utils.lazy import lazy_names

_HOME = {
    "verl.recipe.dpo.online": "DPOTrainer LocalDPOTrainer",
    "verl.recipe.dpo.offline": "OfflineDPOTrainer",
}

__all__, __getattr__, __dir__ = lazy_names(__name__, _HOME)
