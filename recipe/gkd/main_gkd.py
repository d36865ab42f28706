"""python -m verl.recipe.gkd.main_gkd key=value ...: on-policy distillation without rewards, with gkd.yaml below these.

GKD (Agarwal et al. 2023, arXiv 2306.13649) is the main trainer's distillation without what rewards need:

    prompts -> repeat -> gen -> teacher -> update_actor
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import torch

from verl.config import Problem
from verl.config.public.aliases import GKD
from verl.config.schema.ppo import Config
from verl.dataflow import CONTROLLER, DataFlow, Operator
from verl.protocol import DataProto
from verl.trainer.checks.preflight import Recipe
from verl.trainer.main_ppo import main
from verl.trainer.ppo_trainer import PPOTrainer

SCORES = ("token_level_scores", "token_level_rewards")


class GKDConfig(Config):
    """The root of a GKD configuration."""

    aliases: ClassVar = GKD


def check_settings(config: Config) -> Iterator[Problem]:
    """Settings that are invalid for GKD."""
    algorithm, loss = config.algorithm, config.distillation.distillation_loss
    rules = {
        "distillation.enabled": (not config.distillation.enabled, "GKD needs a teacher: use true"),
        "distillation.distillation_loss.use_task_rewards": (loss.use_task_rewards, "GKD has no rewards: use false"),
        "algorithm.filter_groups.enable": (algorithm.filter_groups.enable, "GKD has no rewards: use false"),
        "algorithm.use_kl_in_reward": (algorithm.use_kl_in_reward, "GKD has no rewards: use false"),
    }
    yield from (Problem(key, problem) for key, (is_wrong, problem) in rules.items() if is_wrong)


def without_rewards(flow: DataFlow) -> DataFlow:
    """Remove rewards and advantages from the flow of the main trainer."""

    def no_scores(batch: DataProto) -> dict[str, torch.Tensor]:
        return dict.fromkeys(SCORES, torch.zeros(batch.batch["response_mask"].shape))

    update = flow["update_actor"]
    reads = tuple(name for name in update.reads if name != "advantages")
    flow.replace("reward", Operator("reward", no_scores, ("response_mask",), SCORES, on=CONTROLLER))
    return flow.remove("adv").replace("update_actor", replace(update, reads=reads))


class GKDTrainer(PPOTrainer):
    """GKD on the cluster of trainer.backend. The responses of a validation are scored, those of training are not.

    >>> GKDTrainer(overrides=["distillation.teacher_models.teacher.model_path=my-teacher", ...]).fit()
    """

    recipe = Recipe(
        "GKD",
        Path(__file__).with_name("gkd.yaml"),
        GKDConfig,
        check_settings,
        scores_training=lambda config: False,
    )

    def build_flow(self) -> DataFlow:
        return without_rewards(super().build_flow())

    def step_metrics(self, batch: DataProto) -> dict[str, float]:
        """Metrics of the main trainer without those of scores."""
        self._warned_of_equal_scores = True  # all of them are 0
        metrics, scores = super().step_metrics(batch), ("critic/score", "critic/rewards", "reward/tied_groups")
        return {name: value for name, value in metrics.items() if not name.startswith(scores)}


if __name__ == "__main__":
    sys.exit(main(trainer=GKDTrainer, program="verl.recipe.gkd.main_gkd"))
