"""DPO on a Ray cluster: the same edit of the flow."""

from recipe.dpo.trainer import DPO
from verl.trainer.ray_trainer import RayPPOTrainer


class RayDPOTrainer(DPO, RayPPOTrainer):
    """DPO on a Ray cluster."""
