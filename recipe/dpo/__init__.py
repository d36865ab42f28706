"""DPO: of two answers to a prompt one is better, by reward or by the rows of a file."""

from recipe.dpo.trainer import LocalDPOTrainer

__all__ = ["LocalDPOTrainer"]
