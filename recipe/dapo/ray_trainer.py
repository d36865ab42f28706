"""DAPO on a Ray cluster: the same edit of the flow."""

from recipe.dapo.trainer import DAPO
from verl.trainer.ray_trainer import RayPPOTrainer


class RayDAPOTrainer(DAPO, RayPPOTrainer):
    """DAPO on a Ray cluster."""
