"""python -m verl.recipe.flowrl.main_flowrl key=value ...: FlowRL, with flowrl.yaml below the settings of the command.

FlowRL (Zhu et al. 2025, arXiv 2509.15207) is the main trainer's flow with one more operator and the loss `flowrl`:

    ... old_log_prob -> ref -> adv -> log_z -> update_actor
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from verl.config import Problem
from verl.config.schema.ppo import Config
from verl.dataflow import DataFlow, Operator
from verl.protocol import DataProto
from verl.recipe.flowrl.loss import log_partition
from verl.trainer.checks.preflight import Recipe
from verl.trainer.main_ppo import main
from verl.trainer.ppo_trainer import PPOTrainer

LOSS = "verl.recipe.flowrl.registration"
READS = ("advantages", "old_log_probs", "ref_log_prob", "response_mask", "uid")


def check_settings(config: Config) -> Iterator[Problem]:
    """Settings that are invalid for FlowRL."""
    policy = config.actor_rollout_ref
    rules = {
        "imports": (LOSS not in config.imports, f"add {LOSS}, which registers the loss in every process"),
        "actor_rollout_ref.ref.enable": (not policy.ref.enable, "FlowRL reads the reference: use true"),
        "actor_rollout_ref.rollout.n": (policy.rollout.n < 2, "1, but log Z is a mean over responses: use 4 or more"),
        "actor_rollout_ref.actor.policy_loss.loss_mode": (
            policy.actor.policy_loss.loss_mode != "flowrl",
            "FlowRL has its own: use flowrl",
        ),
    }
    yield from (Problem(key, problem) for key, (is_wrong, problem) in rules.items() if is_wrong)


class FlowRLTrainer(PPOTrainer):
    """FlowRL on the cluster of trainer.backend.

    >>> FlowRLTrainer(overrides=["data.train_files=train.parquet", "actor_rollout_ref.model.path=my-model"]).fit()
    """

    recipe = Recipe("FlowRL", Path(__file__).with_name("flowrl.yaml"), check=check_settings)

    def build_flow(self) -> DataFlow:
        beta = self.config.actor_rollout_ref.actor.policy_loss.loss_kwargs.get("flowrl_beta", 15.0)

        def log_z(batch: DataProto) -> dict:
            columns = {name: batch.column(name) for name in READS}
            return {"log_z": log_partition(**columns, beta=beta)}

        return super().build_flow().insert_before("update_actor", Operator("log_z", log_z, READS, "log_z"))


if __name__ == "__main__":
    sys.exit(main(trainer=FlowRLTrainer, program="verl.recipe.flowrl.main_flowrl"))
