"""Online DPO (Guo et al. 2024, arXiv 2402.04792; the loss: Rafailov et al. 2023, arXiv 2305.18290) as a flow edit.

    prompts -> repeat -> gen -> reward -> [filter_groups] -> pairs -> ref -> update_actor

There are no advantages: `old_log_prob` and `adv` are removed, and the update learns which of two responses is
preferred. Offline, with dpo.answers=file, both responses come from the data:

    prompts -> repeat -> responses -> pairs -> ref -> update_actor
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Dataset

from verl.algorithms.preference import select_pairs
from verl.config import Problem
from verl.data.sequences import build_sequences
from verl.dataflow import DataFlow, Operator
from verl.protocol import DataProto
from verl.recipe.dpo.worker import DPOConfig, DPOSection
from verl.registry import did_you_mean
from verl.trainer.output.metrics import group_rows
from verl.trainer.ppo.operators import SEQUENCES, Roles, Update
from verl.trainer.startup.inputs import Inputs

SCORES = ("token_level_scores", "token_level_rewards")


def check_settings(config: DPOConfig) -> Iterator[Problem]:
    """Settings that are invalid for DPO."""
    policy, dpo = config.actor_rollout_ref, config.dpo
    rules = {
        "actor_rollout_ref.rollout.n": (policy.rollout.n < 2, "1, but a preference needs two responses: use 2 or more"),
        "actor_rollout_ref.ref.enable": (not policy.ref.enable, "DPO needs the reference: use true"),
        "actor_rollout_ref.rollout.truncated_log_probs": (
            policy.rollout.filters_log_probs,
            "true, but DPO compares log-probs over all tokens: use false",
        ),
        "dpo.answers": (
            dpo.answers == "file" and (policy.rollout.n != 2 or config.algorithm.filter_groups.enable),
            "file gives two responses to a prompt: use actor_rollout_ref.rollout.n=2, without algorithm.filter_groups",
        ),
        "dpo.label_smoothing": (
            dpo.loss_type == "ipo" and dpo.label_smoothing > 0,
            "has no effect with dpo.loss_type=ipo: leave it at 0",
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


def check_pairs(config: DPOConfig, inputs: Inputs) -> None:
    """Offline: check that every row has two different responses within the length limit. Raises ValueError."""
    if config.dpo.answers == "file":
        responses = ResponsesOfData(config.dpo, inputs.tokenizer, config.data.max_response_length)
        responses.check(inputs.train_dataset)


def online_dpo(flow: DataFlow, config: DPOConfig, roles: Roles) -> DataFlow:
    """Edit the flow of the main trainer."""
    actor = config.actor_rollout_ref.actor
    plan = 2 * actor.ppo_mini_batch_size, actor.ppo_epochs, actor.shuffle, actor.data_loader_seed
    update = Operator(
        "update_actor",
        Update(roles, "actor", "update_dpo", *plan, rows_per_unit=2),
        reads=(*SEQUENCES, "ref_log_prob", "response_mask"),  # and pair_weight, which `pairs` adds to its rows
    )
    flow.insert_before("old_log_prob", Operator("pairs", pairs, reads=("uid", "token_level_rewards")))
    return flow.remove("old_log_prob").remove("adv").replace("update_actor", update)


def pairs(batch: DataProto) -> DataProto:
    """Select the best and the worst response of each prompt, with the column `pair_weight`.

    A zero-variance group has no preference: its pair gets weight 0, and is kept so that every step has the same number
    of rows. `filter_groups` samples other prompts instead.
    """
    rewards, uids = batch.batch["token_level_rewards"].sum(1), batch.non_tensor_batch["uid"]
    chosen, rejected, ties = select_pairs(rewards, uids)
    preferences = {uids[better]: (better, worse) for better, worse in zip(chosen.tolist(), rejected.tolist())}
    rows = [preferences.get(uids[group[0]], (group[0], group[1])) for group in group_rows(batch)]
    weights = [float(uids[better] in preferences) for better, _ in rows]
    batch.meta_info["metrics"] = {
        "dpo/score_mean": rewards.mean().item(),  # of all responses, before the selection
        "dpo/ties": ties / len(rows),
    }
    return batch[[row for pair in rows for row in pair]].replace(pair_weight=torch.tensor(weights).repeat_interleave(2))


def use_responses_of_data(flow: DataFlow, responses: "ResponsesOfData") -> DataFlow:
    """Further edit for offline DPO: nothing is generated or scored."""
    writes = (*SEQUENCES, "prompts", "response_mask", *SCORES)
    operator = Operator("responses", responses, ("prompt_ids",), writes)  # and sample_index, from `repeat`
    return flow.replace("gen", operator).remove("reward")


class ResponsesOfData:
    """The two responses of each row, tokenized, with an end token: the chosen one has score 1, the rejected one 0.

    A response is text, or a list of chat messages whose last one is the response.

    Args:
        response_length: max tokens of a response, including its end token.
    """

    def __init__(self, dpo: DPOSection, tokenizer: Any, response_length: int):
        self.keys = (dpo.chosen_key, dpo.rejected_key)
        self.tokenizer = tokenizer
        self.response_length = response_length

    def __call__(self, batch: DataProto) -> DataProto:
        indices = batch.non_tensor_batch["sample_index"].tolist()
        responses = [self.tokens(batch.non_tensor_batch[self.keys[i]][row]) for row, i in enumerate(indices)]
        columns = build_sequences(list(batch.non_tensor_batch["prompt_ids"]), responses, self.tokenizer.pad_token_id)
        scores = torch.zeros(columns["responses"].shape)
        ends = [len(ids) - 1 for ids in responses]
        scores[range(len(responses)), ends] = 1 - torch.tensor(indices, dtype=torch.float32)
        return DataProto.from_dict({**columns, **dict.fromkeys(SCORES, scores)})

    def tokens(self, response: str | list[dict[str, Any]]) -> list[int]:
        """Token ids of a response, including the end token."""
        text = response if isinstance(response, str) else response[-1]["content"]
        return [*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id]

    def check(self, dataset: Dataset) -> None:
        """Raise ValueError for a row without two different responses within the length limit."""
        for row in range(len(dataset)):
            item = dataset[row]
            if missing := [key for key in self.keys if key not in item]:
                raise ValueError(f"DPO: no column {missing[0]!r}: {did_you_mean(missing[0], map(str, item))}")
            chosen, rejected = (self.tokens(item[key]) for key in self.keys)
            if chosen == rejected:
                raise ValueError(f"DPO: row {row}: chosen and rejected are equal: {item[self.keys[0]]!r:.80}")
            if (longest := max(len(chosen), len(rejected))) > self.response_length:
                raise ValueError(
                    f"DPO: row {row}: a response has {longest} tokens with its end, but data.max_response_length is "
                    f"{self.response_length}: raise it, or remove the row"
                )
