"""The trainers of PRIME: the flow of flow.py, and one role more, the implicit process reward model."""

from pathlib import Path

from recipe.prime.config import PrimeConfig
from recipe.prime.flow import prime_flow
from recipe.prime.worker import ImplicitPRMWorker
from verl.dataflow import DataFlow
from verl.single_controller import WorkerSpec
from verl.trainer.launch import Recipe
from verl.trainer.local_trainer import LocalPPOTrainer
from verl.trainer.ppo_trainer import PPOTrainer
from verl.trainer.setup import stop_token_ids

RECIPE = Recipe("PRIME", Path(__file__).with_name("prime.yaml"), PrimeConfig)


class PRIME(PPOTrainer):
    """What makes a trainer one of PRIME; the other parent says who executes it."""

    recipe = RECIPE
    saved_roles = ("actor", "critic", "prm")

    def build_flow(self) -> DataFlow:
        ends = stop_token_ids(self.config.actor_rollout_ref.model.path, self.tokenizer)
        return prime_flow(super().build_flow(), self.config, self.roles, ends)

    def worker_specs(self) -> dict[str, WorkerSpec]:
        config = self.config
        kwargs = {
            "config": config.prime,
            "policy": config.actor_rollout_ref,
            "device": config.trainer.device,
            "total_training_steps": self.total_steps,
        }
        return super().worker_specs() | {"prm": WorkerSpec(ImplicitPRMWorker, kwargs)}


class LocalPRIMETrainer(PRIME, LocalPPOTrainer):
    """PRIME on one host.

    >>> LocalPRIMETrainer(overrides=["data.train_files=train.parquet", "actor_rollout_ref.model.path=my-model"]).fit()
    """
