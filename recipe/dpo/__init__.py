"""Online DPO: the better and the worse answer of each prompt, by reward, as a preference."""

from recipe.dpo.trainer import LocalDPOTrainer

__all__ = ["LocalDPOTrainer"]
