"""python -m verl.recipe.dpo.main_dpo key=value ...: DPO, with dpo.yaml below the settings on the command line."""

import sys
from pathlib import Path

from verl.dataflow import DataFlow
from verl.protocol import DataProto
from verl.recipe.dpo.flow import ResponsesOfData, check_pairs, check_settings, online_dpo, use_responses_of_data
from verl.recipe.dpo.worker import DPOActorWorker, DPOConfig
from verl.single_controller import WorkerSpec
from verl.trainer.checks.preflight import Recipe
from verl.trainer.main_ppo import main
from verl.trainer.ppo_trainer import PPOTrainer

RECIPE = Recipe(
    "DPO",
    Path(__file__).with_name("dpo.yaml"),
    DPOConfig,
    check_settings,
    check_pairs,
    scores_training=lambda config: config.dpo.answers == "policy",
)


class DPOTrainer(PPOTrainer):
    """DPO on the cluster of trainer.backend: a different flow, and an actor with a different update.

    >>> DPOTrainer(overrides=["data.train_files=train.parquet", "actor_rollout_ref.model.path=my-model"]).fit()
    """

    recipe = RECIPE

    def build_flow(self) -> DataFlow:
        config, flow = self.config, online_dpo(super().build_flow(), self.config, self.roles)
        if config.dpo.answers == "policy":
            return flow
        return use_responses_of_data(flow, ResponsesOfData(config.dpo, self.tokenizer, config.data.max_response_length))

    def worker_specs(self) -> dict[str, WorkerSpec]:
        specs = super().worker_specs()
        actor = WorkerSpec(DPOActorWorker, {**specs["actor"].kwargs, "dpo": self.config.dpo})
        return specs | {"actor": actor}

    def step_metrics(self, batch: DataProto) -> dict[str, float]:
        """Metrics of the main trainer, except that the mean score is over all responses instead of the selected
        pairs."""
        return super().step_metrics(batch) | {"critic/score/mean": batch.meta_info["metrics"]["dpo/score_mean"]}


LocalDPOTrainer = DPOTrainer  # its name in earlier releases


if __name__ == "__main__":
    sys.exit(main(trainer=DPOTrainer, program="verl.recipe.dpo.main_dpo"))
