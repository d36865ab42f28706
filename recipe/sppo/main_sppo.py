"""python -m verl.recipe.sppo.main_sppo key=value ...: SPPO, with sppo.yaml below the settings on the command line.

Wu et al. 2024 (arXiv 2405.00675) is the main trainer's flow with an estimator and a policy loss, both named `sppo`.
"""

import sys
from pathlib import Path

from verl.trainer.checks.preflight import Recipe
from verl.trainer.main_ppo import main
from verl.trainer.ppo_trainer import PPOTrainer


class SPPOTrainer(PPOTrainer):
    """SPPO on the cluster of trainer.backend.

    >>> SPPOTrainer(overrides=["data.train_files=train.parquet", "actor_rollout_ref.model.path=my-model"]).fit()
    """

    recipe = Recipe("SPPO", Path(__file__).with_name("sppo.yaml"))


if __name__ == "__main__":
    sys.exit(main(trainer=SPPOTrainer, program="verl.recipe.sppo.main_sppo"))
