"""RayPPOTrainer: PPOTrainer on a Ray cluster (docs/multinode.md)."""

from verl.compat.hook import published_names
from verl.trainer.ppo_trainer import PPOTrainer


class RayPPOTrainer(PPOTrainer):
    """Policy optimization on a Ray cluster.

    >>> RayPPOTrainer(config_path="./config.yaml", train_dataset=train_dataset).fit()
    """

    backend = "ray"


__getattr__ = published_names(__name__)
