"""Online preference optimization (Guo et al. 2024, arXiv 2402.04792) as a flow edit: `verl dpo --online`.

    prompts -> repeat -> gen -> reward -> [filter_groups] -> pairs -> [mismatched] -> [ref] -> update_actor

There are no advantages: `old_log_prob` and `adv` are removed, and the update learns which of two responses is
preferred. `offline` trains on the pairs of a file.
"""

from collections.abc import Iterator
from pathlib import Path

import torch

from verl.algorithms.preference import PreferenceLoss
from verl.config import ConfigError, Problem
from verl.config.schema import Config
from verl.dataflow import DataFlow, Operator
from verl.protocol import DataProto
from verl.recipe.dpo.offline import check_loss, loss_of
from verl.recipe.dpo.worker import DPOActorWorker, OnlineDPOConfig, with_mismatched
from verl.single_controller import WorkerSpec
from verl.trainer.checks.preflight import Recipe
from verl.trainer.output.metrics import group_rows
from verl.trainer.ppo.operators import SEQUENCES, Roles, Update
from verl.trainer.ppo_trainer import PPOTrainer
from verl.trainer.startup.inputs import Inputs


def check_settings(config: OnlineDPOConfig) -> Iterator[Problem]:
    """Settings that are invalid for online DPO."""
    policy = config.actor_rollout_ref
    rules = {
        "actor_rollout_ref.rollout.n": (policy.rollout.n < 2, "1, but a preference needs two responses: use 2 or more"),
        "actor_rollout_ref.rollout.truncated_log_probs": (
            policy.rollout.filters_log_probs,
            "true, but DPO compares log-probs over all tokens: use false",
        ),
        "algorithm.adv_estimator": (
            config.algorithm.adv_estimator != "grpo",
            "DPO does not compute advantages: leave it at grpo, whose operator is removed",
        ),
        "algorithm.use_kl_in_reward": (
            config.algorithm.use_kl_in_reward or policy.actor.use_kl_loss,
            "true here or in actor.use_kl_loss, but DPO limits the KL by dpo.beta: use false",
        ),
    }
    yield from (Problem(key, problem) for key, (is_wrong, problem) in rules.items() if is_wrong)
    problems = [*check_loss(config)]
    yield from problems
    if not problems and not config.imports:
        yield from check_reference(config)


def check_reference(config: OnlineDPOConfig) -> Iterator[Problem]:
    """There is a reference policy if and only if the loss reads it."""
    loss = loss_of(config)
    if loss.needs_reference != bool(config.actor_rollout_ref.ref.enable):
        use = "needs the reference: use true" if loss.needs_reference else "reads no reference: use false"
        yield Problem("actor_rollout_ref.ref.enable", f"the loss {loss.name} {use}")


def check_loss_of_code(config: OnlineDPOConfig, inputs: Inputs) -> None:
    """The same for a loss that custom code registers. Raises ConfigError."""
    if problems := [*check_reference(config)]:
        raise ConfigError(problems)


def online_dpo(flow: DataFlow, config: Config, roles: Roles, loss: PreferenceLoss) -> DataFlow:
    """Edit the flow of the main trainer."""
    actor = config.actor_rollout_ref.actor
    rows = 4 if loss.needs_kl else 2  # of a prompt
    plan = rows * actor.ppo_mini_batch_size, actor.ppo_epochs, actor.shuffle, actor.data_loader_seed
    columns = (*SEQUENCES, "response_mask")  # and label, margin and pair_weight, which `pairs` adds to its rows
    update = Operator(
        "update_actor",
        Update(roles, "actor", "update_dpo", *plan, rows_per_unit=2),
        reads=(*columns, "ref_log_prob") if loss.needs_reference else columns,
    )
    flow.insert_before("old_log_prob", Operator("pairs", pairs, reads=("uid", "token_level_rewards")))
    if loss.needs_kl:
        flow.insert_after("pairs", Operator("mismatched", with_mismatched, reads=("prompts", *columns)))
    return flow.remove("old_log_prob").remove("adv").replace("update_actor", update)


def pairs(batch: DataProto) -> DataProto:
    """Select the best and the worst response of each prompt, with the columns `label`, `margin` and `pair_weight`.

    Among equal rewards, the first response is taken. A zero-variance group has no preference: its pair gets weight 0,
    and is kept so that every step has the same number of rows. `filter_groups` samples other prompts instead.

    Raises:
        ValueError: a reward is NaN.
    """
    rewards = batch.batch["token_level_rewards"].sum(1)
    if (nan := rewards.isnan()).any():
        raise ValueError(f"rewards: expected finite numbers, found NaN in rows {nan.nonzero().flatten().tolist()}")
    groups = [torch.from_numpy(group) for group in group_rows(batch)]
    differs = torch.tensor([bool(rewards[group].max() > rewards[group].min()) for group in groups])
    better = torch.stack([group[rewards[group].argmax()] for group in groups])  # argmax and argmin: the first
    worse = torch.stack([group[rewards[group].argmin()] for group in groups])
    worse = torch.where(differs, worse, torch.stack([group[1] for group in groups]))
    batch.meta_info["metrics"] = {
        "dpo/score_mean": rewards.mean().item(),  # of all responses, before the selection
        "dpo/ties": int((~differs).sum()) / len(groups),
    }
    return batch[torch.stack([better, worse], 1).flatten()].replace(
        label=torch.tensor([1.0, 0.0]).repeat(len(groups)),
        margin=(rewards[better] - rewards[worse]).repeat_interleave(2),
        pair_weight=differs.float().repeat_interleave(2),
    )


class DPOTrainer(PPOTrainer):
    """Online DPO on the cluster of trainer.backend: a different flow, and an actor with a different update.

    >>> DPOTrainer(overrides=["data.train_files=train.parquet", "actor_rollout_ref.model.path=my-model"]).fit()
    """

    recipe = Recipe(
        "online DPO", Path(__file__).with_name("dpo.yaml"), OnlineDPOConfig, check_settings, check_loss_of_code
    )

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
