"""PRIME on a Ray cluster: the same edit of the flow."""

from recipe.prime.trainer import PRIME
from verl.trainer.ray_trainer import RayPPOTrainer


class RayPRIMETrainer(PRIME, RayPPOTrainer):
    """PRIME on a Ray cluster."""
