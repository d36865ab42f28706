"""DAPO (Yu et al. 2025, arXiv 2503.14476) is the main trainer's flow with dynamic sampling, and settings of its own.

    prompts -> repeat -> gen -> reward -> filter_groups -> old_log_prob -> adv -> update_actor

The four parts and where they are:

- clip-higher, token-level loss: settings of the loss `vanilla`, in dapo.yaml
- dynamic sampling: `verl.trainer.dynamic_sampling`, which `algorithm.filter_groups.enable` puts into any flow
- soft overlong penalty: the reward manager `dapo`
"""

from pathlib import Path

from verl.config import ConfigError, Problem
from verl.dataflow import DataFlow
from verl.trainer.launch import Recipe
from verl.trainer.local_trainer import LocalPPOTrainer
from verl.trainer.ppo_trainer import PPOTrainer

RECIPE = Recipe("DAPO", Path(__file__).with_name("dapo.yaml"))


class DAPO(PPOTrainer):
    """What makes a trainer one of DAPO; the other parent says who executes it."""

    recipe = RECIPE

    def build_flow(self) -> DataFlow:
        if not self.config.algorithm.filter_groups.enable:
            raise ConfigError([Problem("algorithm.filter_groups.enable", "false: DAPO samples dynamically; use true")])
        return super().build_flow()


class LocalDAPOTrainer(DAPO, LocalPPOTrainer):
    """DAPO on one host.

    >>> LocalDAPOTrainer(overrides=["data.train_files=train.parquet", "actor_rollout_ref.model.path=my-model"]).fit()
    """
