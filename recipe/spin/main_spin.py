"""python -m verl.recipe.spin.main_spin key=value ...: SPIN, with spin.yaml below the settings on the command line."""

import sys
from pathlib import Path

from verl.dataflow import DataFlow
from verl.recipe.dpo.online import DPOTrainer, online_dpo
from verl.recipe.spin.flow import (
    SPINActorWorker,
    SPINConfig,
    SPINRefWorker,
    check_responses,
    check_settings,
    loss_of,
    spin_flow,
)
from verl.single_controller import WorkerSpec
from verl.trainer.checks.preflight import Recipe
from verl.trainer.main_ppo import main
from verl.trainer.ppo_trainer import PPOTrainer


class SPINTrainer(DPOTrainer):
    """SPIN on the cluster of trainer.backend: the actor of DPO, and a reference that is updated.

    >>> SPINTrainer(overrides=["data.train_files=train.parquet", "actor_rollout_ref.model.path=my-model"]).fit()
    """

    recipe = Recipe(
        "SPIN",
        Path(__file__).with_name("spin.yaml"),
        SPINConfig,
        check_settings,
        check_responses,
        scores_training=lambda config: config.spin.preferred == "reward",
    )
    saved_roles = ("actor", "critic", "ref")

    def build_flow(self) -> DataFlow:
        flow = online_dpo(PPOTrainer.build_flow(self), self.config, self.roles, loss_of(self.config))
        folder = Path(self.run.working_dir, self.config.trainer.default_local_dir, "reference")
        return spin_flow(flow, self.config, self.roles, self.tokenizer, folder)

    def worker_specs(self) -> dict[str, WorkerSpec]:
        specs = PPOTrainer.worker_specs(self)
        specs["actor"] = WorkerSpec(SPINActorWorker, {**specs["actor"].kwargs, "loss": loss_of(self.config)})
        if "ref" in specs:  # with LoRA, the reference is the actor's base model
            specs["ref"] = WorkerSpec(SPINRefWorker, specs["ref"].kwargs)
        return specs


if __name__ == "__main__":
    sys.exit(main(trainer=SPINTrainer, program="verl.recipe.spin.main_spin"))
