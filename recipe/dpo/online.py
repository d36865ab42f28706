"""Online preference optimization: the trainer of `verl dpo --online`, with dpo.yaml below the user's settings."""

from pathlib import Path

from verl.dataflow import DataFlow
from verl.protocol import DataProto
from verl.recipe.dpo.flow import check_loss_of_code, check_settings, online_dpo
from verl.recipe.dpo.offline import loss_of
from verl.recipe.dpo.worker import DPOActorWorker, OnlineDPOConfig
from verl.single_controller import WorkerSpec
from verl.trainer.checks.preflight import Recipe
from verl.trainer.ppo_trainer import PPOTrainer

RECIPE = Recipe("online DPO", Path(__file__).with_name("dpo.yaml"), OnlineDPOConfig, check_settings, check_loss_of_code)


class DPOTrainer(PPOTrainer):
    """Online DPO on the cluster of trainer.backend: a different flow, and an actor with a different update.

    >>> DPOTrainer(overrides=["data.train_files=train.parquet", "actor_rollout_ref.model.path=my-model"]).fit()
    """

    recipe = RECIPE

    def build_flow(self) -> DataFlow:
        return online_dpo(super().build_flow(), self.config, self.roles, loss_of(self.config))

    def worker_specs(self) -> dict[str, WorkerSpec]:
        specs = super().worker_specs()
        actor = WorkerSpec(DPOActorWorker, {**specs["actor"].kwargs, "loss": loss_of(self.config)})
        return specs | {"actor": actor}

    def step_metrics(self, batch: DataProto) -> dict[str, float]:
        """Metrics of the main trainer, except that the mean score is over all responses instead of the selected
        pairs."""
        return super().step_metrics(batch) | {"critic/score/mean": batch.meta_info["metrics"]["dpo/score_mean"]}


LocalDPOTrainer = DPOTrainer  # its name in earlier releases
