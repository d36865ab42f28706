"""Trainers: one loop over a flow, on any cluster."""

from verl.utils.lazy import lazy_names

__all__ = ["PPOTrainer", "SFTTrainer"]

__getattr__, __dir__ = lazy_names(
    __name__, {"PPOTrainer": "verl.trainer.ppo_trainer", "SFTTrainer": "verl.trainer.sft"}
)
