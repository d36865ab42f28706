"""Trainers: one loop over a flow, on any cluster. Names are loaded at first use."""

from verl.utils.lazy import lazy_names

_HOME = {"PPOTrainer": "verl.trainer.ppo_trainer", "SFTTrainer": "verl.trainer.sft"}

__all__ = [*_HOME]

__getattr__, __dir__ = lazy_names(__name__, _HOME)
