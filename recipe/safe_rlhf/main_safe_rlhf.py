"""python -m verl.recipe.safe_rlhf.main_safe_rlhf key=value ...: Safe RLHF, with safe_rlhf.yaml below these settings."""

import sys
from pathlib import Path

from verl.dataflow import DataFlow
from verl.recipe.safe_rlhf.config import SafeRLHFConfig, check_settings
from verl.recipe.safe_rlhf.flow import safe_flow
from verl.single_controller import WorkerSpec
from verl.trainer.checks.preflight import Recipe
from verl.trainer.main_ppo import main
from verl.trainer.ppo.flow import needs_critic
from verl.trainer.ppo_trainer import PPOTrainer


class SafeRLHFTrainer(PPOTrainer):
    """Safe RLHF on the cluster of trainer.backend: up to two more roles, the cost model and the critic of the costs.

    >>> SafeRLHFTrainer(overrides=["data.train_files=train.parquet", "actor_rollout_ref.model.path=my-model"]).fit()
    """

    recipe = Recipe("Safe RLHF", Path(__file__).with_name("safe_rlhf.yaml"), SafeRLHFConfig, check_settings)
    saved_roles = ("actor", "critic", "cost_critic")

    def build_flow(self) -> DataFlow:
        return safe_flow(super().build_flow(), self.config, self.roles)

    def worker_specs(self) -> dict[str, WorkerSpec]:
        from verl.workers.reward_model import RewardModelWorker

        specs, config = super().worker_specs(), self.config
        if needs_critic(config):
            specs["cost_critic"] = specs["critic"]
        if config.safe_rlhf.cost_model.enable:
            kwargs = {"device": config.trainer.device, "policy_tokenizer": self.tokenizer}
            specs["cost"] = WorkerSpec(RewardModelWorker, {"config": config.safe_rlhf.cost_model, **kwargs})
        return specs


if __name__ == "__main__":
    sys.exit(main(trainer=SafeRLHFTrainer, program="verl.recipe.safe_rlhf.main_safe_rlhf"))
