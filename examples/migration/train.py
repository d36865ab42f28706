"""One script for a laptop, for the GPUs of a host and for a cluster: the configuration file says who executes it.

    python examples/migration/train.py examples/migration/1_local.yaml [key=value ...]

    1_local.yaml       one process
    2_processes.yaml   two processes of this host, which share each model by FSDP
    3_ray.yaml         actor and rollout on a Ray cluster, no critic and no reference
    4_ray_roles.yaml   actor, reference, critic and reward model on the cluster, each on devices of its own
"""

import sys

from verl import DataProto, Operator
from verl.algorithms.presets import PRESETS
from verl.config import load_config
from verl.registry import load_object
from verl.trainer.main_ppo import TRAINERS


def count_long_answers(batch: DataProto) -> None:
    """An operator of one's own: it runs in this process, whoever executes the others."""
    mask = batch.batch["response_mask"]
    batch.meta_info["metrics"] = {"my/long_answers": (mask.sum(1) == mask.shape[1]).float().mean().item()}


def main(config_path: str, overrides: list[str]) -> dict[str, float]:
    """Train; the last metrics."""
    backend = load_config(config_path, overrides, presets=PRESETS).trainer.backend

    class MyTrainer(load_object(*TRAINERS[backend])):
        def build_flow(self):
            return super().build_flow().insert_before("adv", Operator("count", count_long_answers))

    return MyTrainer(config_path=config_path, overrides=overrides).fit()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
