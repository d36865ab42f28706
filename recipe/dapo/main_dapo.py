"""python -m verl.recipe.dapo.main_dapo key=value ...: DAPO, with dapo.yaml below the settings on the command line.

DAPO (Yu et al. 2025, arXiv 2503.14476) is the main trainer's flow with dynamic sampling:

    prompts -> repeat -> gen -> reward -> filter_groups -> old_log_prob -> adv -> update_actor

- clip-higher, token-level loss: settings of the loss `vanilla`, in dapo.yaml
- dynamic sampling: `verl.trainer.ppo.dynamic_sampling`, which `algorithm.filter_groups.enable` adds to any flow; with
  false, this is DAPO without dynamic sampling
- soft overlong penalty: the reward manager `dapo`
"""

import sys
from pathlib import Path

from verl.trainer.checks.preflight import Recipe
from verl.trainer.main_ppo import main
from verl.trainer.ppo_trainer import PPOTrainer
from verl.trainer.ray_trainer import RayPPOTrainer


class DAPOTrainer(PPOTrainer):
    """DAPO on the cluster of trainer.backend.

    >>> DAPOTrainer(overrides=["data.train_files=train.parquet", "actor_rollout_ref.model.path=my-model"]).fit()
    """

    recipe = Recipe("DAPO", Path(__file__).with_name("dapo.yaml"))


LocalDAPOTrainer = DAPOTrainer  # its name in earlier releases


class RayDAPOTrainer(RayPPOTrainer):
    """DAPO on a Ray cluster."""

    recipe = DAPOTrainer.recipe


if __name__ == "__main__":
    sys.exit(main(trainer=DAPOTrainer, program="verl.recipe.dapo.main_dapo"))
