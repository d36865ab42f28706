"""The trainers of DPO: the flow of flow.py or of offline.py, and an actor that knows its update."""

from pathlib import Path

from recipe.dpo.config import DPOConfig
from recipe.dpo.flow import online_dpo
from recipe.dpo.offline import GivenAnswers, given_answers
from recipe.dpo.worker import DPOActorWorker
from verl.dataflow import DataFlow
from verl.protocol import DataProto
from verl.single_controller import WorkerSpec
from verl.trainer.launch import Recipe
from verl.trainer.local_trainer import LocalPPOTrainer
from verl.trainer.ppo_trainer import PPOTrainer

RECIPE = Recipe("DPO", Path(__file__).with_name("dpo.yaml"), DPOConfig)


class DPO(PPOTrainer):
    """What makes a trainer one of DPO; the other parent says who executes it."""

    recipe = RECIPE

    def build_flow(self) -> DataFlow:
        config, flow = self.config, online_dpo(super().build_flow(), self.config, self.roles)
        if config.dpo.answers == "policy":
            return flow
        answers = GivenAnswers(config.dpo, self.tokenizer, config.data.max_response_length)
        answers.check(self.train_dataset)
        return given_answers(flow, answers)

    def worker_specs(self) -> dict[str, WorkerSpec]:
        specs = super().worker_specs()
        actor = WorkerSpec(DPOActorWorker, {**specs["actor"].kwargs, "dpo": self.config.dpo})
        return specs | {"actor": actor}

    def step_metrics(self, batch: DataProto) -> dict[str, float]:
        """As for the main trainer, but the mean score is that of all answers, not of the best and the worst."""
        return super().step_metrics(batch) | {"critic/score/mean": batch.meta_info["metrics"]["dpo/score_mean"]}


class LocalDPOTrainer(DPO, LocalPPOTrainer):
    """DPO on one host.

    >>> LocalDPOTrainer(overrides=["data.train_files=train.parquet", "actor_rollout_ref.model.path=my-model"]).fit()
    """
