"""python -m verl.recipe.entropy.main_entropy key=value ...: KL-Cov or Clip-Cov, with entropy.yaml below these settings.

Cui et al. 2025 (arXiv 2505.22617) is the main trainer's flow with dynamic sampling, and one of two policy losses,
`kl_cov` and `clip_cov`, which are in `verl.algorithms.policy_losses`.
"""

import sys
from pathlib import Path

from verl.trainer.checks.preflight import Recipe
from verl.trainer.main_ppo import main
from verl.trainer.ppo_trainer import PPOTrainer


class EntropyTrainer(PPOTrainer):
    """KL-Cov or Clip-Cov on the cluster of trainer.backend.

    >>> EntropyTrainer(overrides=["data.train_files=train.parquet", "actor_rollout_ref.model.path=my-model"]).fit()
    """

    recipe = Recipe("entropy mechanism", Path(__file__).with_name("entropy.yaml"))


if __name__ == "__main__":
    sys.exit(main(trainer=EntropyTrainer, program="verl.recipe.entropy.main_entropy"))
