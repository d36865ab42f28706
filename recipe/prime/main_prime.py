"""python -m verl.recipe.prime.main_prime key=value ...: PRIME, with prime.yaml below the command line."""

import sys
from pathlib import Path

from verl.dataflow import DataFlow
from verl.recipe.prime.flow import check_settings, prime_flow
from verl.recipe.prime.worker import ImplicitPRMWorker, PrimeConfig
from verl.single_controller import WorkerSpec
from verl.trainer.checks.preflight import Recipe
from verl.trainer.main_ppo import main
from verl.trainer.ppo_trainer import PPOTrainer
from verl.trainer.startup.inputs import stop_token_ids


class PRIMETrainer(PPOTrainer):
    """PRIME on the cluster of trainer.backend: a different flow, and an additional role, the implicit PRM.

    >>> PRIMETrainer(overrides=["data.train_files=train.parquet", "actor_rollout_ref.model.path=my-model"]).fit()
    """

    recipe = Recipe("PRIME", Path(__file__).with_name("prime.yaml"), PrimeConfig, check_settings)
    saved_roles = ("actor", "critic", "prm")

    def build_flow(self) -> DataFlow:
        end_tokens = stop_token_ids(self.config.actor_rollout_ref.model.path, self.tokenizer)
        return prime_flow(super().build_flow(), self.config, self.roles, end_tokens)

    def worker_specs(self) -> dict[str, WorkerSpec]:
        config = self.config
        kwargs = {
            "config": config.prime,
            "policy": config.actor_rollout_ref,
            "device": config.trainer.device,
            "total_training_steps": self.total_steps,
        }
        return super().worker_specs() | {"prm": WorkerSpec(ImplicitPRMWorker, kwargs)}


LocalPRIMETrainer = PRIMETrainer  # its name in earlier releases


if __name__ == "__main__":
    sys.exit(main(trainer=PRIMETrainer, program="verl.recipe.prime.main_prime"))
