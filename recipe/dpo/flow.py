"""Online DPO (Guo et al. 2024, arXiv 2402.04792; its loss: Rafailov et al. 2023, arXiv 2305.18290) as an edit.

    prompts -> repeat -> gen -> reward -> [filter_groups] -> pairs -> ref -> update_actor

Nothing is estimated: `old_log_prob` and `adv` are gone, and the update learns that of two answers one is better. With
answers from a file, offline.py takes `gen` and `reward` out too.
"""

import torch

from recipe.dpo.config import DPOConfig
from verl.algorithms.preference import select_pairs
from verl.config import ConfigError, Problem
from verl.dataflow import DataFlow, Operator
from verl.protocol import DataProto
from verl.trainer.dynamic_sampling import group_rows
from verl.trainer.ppo_flow import SEQUENCES, Roles, Update, UpdatePlan


def pairs(batch: DataProto) -> DataProto:
    """Two rows of each prompt, the best answer and the worst, with the column `pair_weight`.

    A prompt whose answers all score alike says nothing: its pair has weight 0, and is there so that ranks and
    mini-batches have the same number of rows in every step. `filter_groups` samples other prompts in its place.
    """
    rewards, uids = batch.batch["token_level_rewards"].sum(1), batch.non_tensor_batch["uid"]
    chosen, rejected, ties = select_pairs(rewards, uids)
    found = {uids[better]: (better, worse) for better, worse in zip(chosen.tolist(), rejected.tolist())}
    rows = [found.get(uids[group[0]], (group[0], group[1])) for group in group_rows(batch)]
    weights = [float(uids[better] in found) for better, _ in rows]
    batch.meta_info["metrics"] = {
        "dpo/score_mean": rewards.mean().item(),  # of all answers, before the choice
        "dpo/ties": ties / len(rows),
    }
    return batch[[row for pair in rows for row in pair]].replace(pair_weight=torch.tensor(weights).repeat_interleave(2))


def online_dpo(flow: DataFlow, config: DPOConfig, roles: Roles) -> DataFlow:
    """The edit. Raises ConfigError for settings that leave no flow of DPO."""
    problems = [Problem(key, what) for key, (wrong, what) in _checks(config).items() if wrong]
    if problems:
        raise ConfigError(problems)
    actor = config.actor_rollout_ref.actor
    plan = UpdatePlan(
        2 * actor.ppo_mini_batch_size, actor.ppo_epochs, actor.shuffle, actor.data_loader_seed, together=2
    )
    update = Operator(
        "update_actor",
        Update(roles, "actor", "update_dpo", plan),
        reads=(*SEQUENCES, "ref_log_prob", "response_mask"),  # and pair_weight, which comes with the rows of `pairs`
    )
    flow.insert_before("old_log_prob", Operator("pairs", pairs, reads=("uid", "token_level_rewards")))
    return flow.remove("old_log_prob").remove("adv").replace("update_actor", update)


def _checks(config: DPOConfig) -> dict[str, tuple[bool, str]]:
    policy = config.actor_rollout_ref
    return {
        "actor_rollout_ref.rollout.n": (policy.rollout.n < 2, "1: a preference needs two answers; use 2 or more"),
        "actor_rollout_ref.ref.enable": (not policy.ref.enable, "DPO needs the reference: use true"),
        "dpo.answers": (
            config.dpo.answers == "file" and (policy.rollout.n != 2 or config.algorithm.filter_groups.enable),
            "file gives two answers to a prompt: use actor_rollout_ref.rollout.n=2, without algorithm.filter_groups",
        ),
        "dpo.label_smoothing": (
            config.dpo.loss_type == "ipo" and config.dpo.label_smoothing > 0,
            "changes nothing with dpo.loss_type=ipo: leave it at 0",
        ),
        "algorithm.adv_estimator": (
            config.algorithm.adv_estimator != "grpo",
            "DPO estimates no advantages; leave it at grpo, whose operator is taken out",
        ),
        "algorithm.use_kl_in_reward": (
            config.algorithm.use_kl_in_reward or policy.actor.use_kl_loss,
            "true here or in actor.use_kl_loss: dpo.beta holds the policy near the reference",
        ),
    }
