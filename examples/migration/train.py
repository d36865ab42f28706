"""One script for a laptop, for the GPUs of a host and for a cluster: the configuration chooses the cluster.

python examples/migration/train.py examples/migration/1_local.yaml [key=value ...]

1_local.yaml       one process
2_processes.yaml   two processes of this host, which share each model by FSDP
3_ray.yaml         actor and rollout on a Ray cluster, critic and reference in this process
4_ray_roles.yaml   actor, reference, critic and reward model on the cluster, each on separate devices
"""

import sys

from verl import DataProto, Operator
from verl.trainer.ppo_trainer import PPOTrainer


def count_long_answers(batch: DataProto) -> None:
    """A custom operator. It runs in this process, wherever the other operators run."""
    mask = batch.batch["response_mask"]
    batch.meta_info["metrics"] = {"my/long_answers": (mask.sum(1) == mask.shape[1]).float().mean().item()}


class MyTrainer(PPOTrainer):
    """The main trainer with one more operator."""

    def build_flow(self):
        return super().build_flow().insert_before("adv", Operator("count", count_long_answers))


def main(config_path: str, overrides: list[str]) -> dict[str, float]:
    """Train; the last metrics."""
    return MyTrainer(config_path=config_path, overrides=overrides).fit()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
