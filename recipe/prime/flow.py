"""PRIME (Cui et al. 2025, arXiv 2502.01456) as an edit of the flow.

    ... reward -> [filter_prompts] -> old_log_prob -> ref -> outcome -> update_prm -> prm -> [kl] -> adv -> update_actor
                                                                (`after`: prm -> update_prm)

The reference is the model from which the policy and phi start. The estimator `prime` reads `rm_scores`, which `prm`
writes.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from verl.algorithms.prime import implicit_process_rewards
from verl.config import Problem
from verl.dataflow import DataFlow, Operator
from verl.protocol import DataProto
from verl.recipe.prime.worker import PrimeConfig, PrimeSection, PromptFilterConfig
from verl.trainer.output.metrics import group_rows
from verl.trainer.ppo.dynamic_sampling import PromptQueue, queue_prompts
from verl.trainer.ppo.operators import SEQUENCES, Roles, Update, sequence_columns


@dataclass(eq=False, repr=False)
class PromptFilter:
    """Selects `num_prompts` of the generated prompts: those of medium accuracy first, then others.

    Preferred prompts that are not needed return to the queue; others are dropped.

    Args:
        config: the section `prime.filter`.
        queue: source of prompts, to which prompts are returned.
        num_prompts: prompts of a training batch.
        response_length: tokens; a response of this length without an end token is truncated.
        stop_token_ids: the end tokens.
    """

    config: PromptFilterConfig
    queue: PromptQueue
    num_prompts: int
    response_length: int
    stop_token_ids: tuple[int, ...]

    def __call__(self, batch: DataProto) -> DataProto:
        accuracy = outcomes(batch)
        truncated = self._is_truncated(batch)
        groups = group_rows(batch)
        preferred = [self._is_preferred(accuracy[rows], truncated[rows]) for rows in groups]
        order = sorted(range(len(groups)), key=lambda i: not preferred[i])  # a stable sort: the preferred ones first
        selected = sorted(order[: self.num_prompts])
        spare = [i for i in order[self.num_prompts :] if preferred[i]]
        if spare:
            self.queue.put_back(batch[[groups[i][0] for i in spare]].select(None, None, []))
        batch.meta_info["metrics"] = {
            "prime/acc_mean": accuracy.mean().item(),  # of all responses, before the selection
            "prime/preferred_share": sum(preferred) / len(groups),
            "prime/others_taken": sum(not preferred[i] for i in selected),
            "prime/prompts_put_back": len(spare),
        }
        return batch[np.concatenate([groups[i] for i in selected])]

    def _is_preferred(self, accuracy: torch.Tensor, truncated: torch.Tensor) -> bool:
        mean, config = accuracy.mean().item(), self.config
        within = config.accuracy_lower_bound <= mean <= config.accuracy_upper_bound
        return within and not (config.filter_truncate and truncated.any())

    def _is_truncated(self, batch: DataProto) -> torch.Tensor:
        """(B,) bool, whether a response has the maximum length and no end token."""
        responses = batch.batch["responses"]
        lengths = batch.batch["attention_mask"][:, -responses.shape[1] :].sum(1)
        last = responses.gather(1, (lengths - 1).clamp(min=0)[:, None]).squeeze(1)
        return (lengths == self.response_length) & ~torch.isin(last, torch.tensor(self.stop_token_ids))


def outcomes(batch: DataProto) -> torch.Tensor:
    """The `acc` of each response, (B,) float32. Raises ValueError if the reward function does not return it."""
    values = batch.column("reward_acc")
    if wrong := [v for v in values if not isinstance(v, bool | int | float | np.number) or not 0 <= v <= 1]:
        raise ValueError(
            f"PRIME needs an `acc` from 0 to 1 for every response, found {wrong[0]!r}: return a dict with `acc` "
            "from the reward function"
        )
    return torch.tensor(values.astype(np.float32))


def process_rewards(roles: Roles, prime: PrimeSection) -> Callable[[DataProto], DataProto]:
    """rm_scores: beta * (log phi - log ref) for every token."""

    def prm(batch: DataProto) -> DataProto:
        output = roles["prm"].compute_prm_log_prob(sequence_columns(batch))
        log_ratio = output.batch["prm_log_prob"] - batch.batch["ref_log_prob"]
        mask = batch.batch["response_mask"]
        scores = implicit_process_rewards(log_ratio, mask, beta=prime.beta, batch_norm=prime.batch_norm)
        metrics = {"prm/log_ratio_mean": log_ratio[mask.bool()].mean().item()}
        return DataProto.from_dict({"rm_scores": scores}, meta_info={"metrics": metrics})

    return prm


def prime_flow(flow: DataFlow, config: PrimeConfig, roles: Roles, stop_token_ids: tuple[int, ...]) -> DataFlow:
    """Edit the flow of the main trainer."""
    prime = config.prime
    n = config.actor_rollout_ref.rollout.n
    prompts = config.data.train_batch_size
    if prime.filter.enable:
        queue = queue_prompts(flow, prime.filter.oversample_factor * prompts)
        prompt_filter = PromptFilter(prime.filter, queue, prompts, config.data.max_response_length, stop_token_ids)
        flow.insert_after(
            "reward", Operator("filter_prompts", prompt_filter, reads=("uid", "responses", "attention_mask"))
        )
    update = Operator(
        "update_prm",
        Update(roles, "prm", "update_prm", prime.ppo_mini_batch_size * n),
        reads=(*SEQUENCES, "ref_log_prob", "response_mask", "acc"),
    )
    score = Operator("prm", process_rewards(roles, prime), (*SEQUENCES, "ref_log_prob", "response_mask"), "rm_scores")
    flow.insert_after("ref", Operator("outcome", lambda batch: {"acc": outcomes(batch)}, (), "acc"))
    first, second = (update, score) if prime.update == "before" else (score, update)
    return flow.insert_after("outcome", first).insert_after(first.name, second)


def check_settings(config: PrimeConfig) -> Iterator[Problem]:
    """Settings that are invalid for PRIME."""
    batch, mini = config.data.train_batch_size, config.prime.ppo_mini_batch_size
    bounds = config.prime.filter
    rules = {
        "algorithm.adv_estimator": (
            config.algorithm.adv_estimator != "prime",
            "PRIME has its own: use prime",
        ),
        "actor_rollout_ref.rollout.truncated_log_probs": (
            config.actor_rollout_ref.rollout.filters_log_probs,
            "true, but the process reward model and the reference compute log-probs over all tokens: use false",
        ),
        "actor_rollout_ref.ref.enable": (
            not config.actor_rollout_ref.ref.enable,
            "phi needs the reference: use true",
        ),
        "algorithm.filter_groups.enable": (
            config.algorithm.filter_groups.enable and bounds.enable,
            "two filters of prompts: set this or prime.filter.enable to false",
        ),
        "prime.ppo_mini_batch_size": (batch % mini, f"{mini} does not divide data.train_batch_size {batch}"),
        "prime.filter.accuracy_lower_bound": (
            bounds.accuracy_lower_bound > bounds.accuracy_upper_bound,
            "above accuracy_upper_bound: no prompt could be preferred",
        ),
    }
    yield from (Problem(key, problem) for key, (is_wrong, problem) in rules.items() if is_wrong)
