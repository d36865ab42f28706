"""Trainers: one loop over a flow, on any cluster. Names are loaded at first use."""

from verl.utils.lazy import lazy_names

_HOME = {
    "verl.trainer.ppo_trainer": "PPOTrainer",
    "verl.trainer.sft": "SFTTrainer",
}

__all__, __getattr__, __dir__ = lazy_names(__name__, _HOME)
