"""A trial of the reward before training: a function that fails does so here, not after the first generated batch."""

import logging
import traceback
from typing import Any

import torch

from verl.data.rlhf_dataset import check_ground_truth
from verl.data.sequences import build_sequences
from verl.protocol import DataProto
from verl.rewards import RewardManager
from verl.trainer.inputs import Inputs

logger = logging.getLogger("verl.trainer")


def try_rewards(inputs: Inputs, uses_model: bool) -> set[str]:
    """Score two trial responses to the first prompt: its ground truth and the prompt itself.

    With a reward model, the trial uses reward model scores of 0 and 1; if the reward is the same for both, a warning is
    logged.

    Args:
        inputs: the loaded inputs.
        uses_model: whether a reward model scores the responses.

    Returns:
        The names of the extra values that the reward function returns.

    Raises:
        ValueError: the data has no ground truth but the function needs it, or the function fails.
    """
    manager = inputs.reward_manager
    if manager.compute_score.needs_ground_truth:
        check_ground_truth(inputs.train_dataset, f"the reward function {manager.compute_score.name}")
    batch = _trial_batch(inputs)
    if not uses_model:
        return set(_score_trial(manager, batch)["reward_extra_info"])
    zeros = torch.zeros(batch.batch["responses"].shape)
    ones = zeros.clone()
    ones[:, 0] = 1.0
    scored = [batch.union(DataProto.from_dict({"rm_scores": scores})) for scores in (zeros, ones)]
    first, second = (_score_trial(manager, each) for each in scored)
    if torch.equal(first["reward_tensor"], second["reward_tensor"]):
        logger.warning(
            "THE REWARD MODEL'S SCORE HAS NO EFFECT: the reward function %s returned the same for the scores 0 and 1. "
            "It gets the score as extra_info['rm_score'], and nothing else uses it. Read it in the function, or remove "
            "the function (then the score is the reward), or set reward.reward_model.enable=false",
            manager.compute_score.where,
        )
    return set(first["reward_extra_info"])


def _trial_batch(inputs: Inputs) -> DataProto:
    tokenizer, item = inputs.tokenizer, inputs.train_dataset[0]
    prompts = inputs.collate([item, item]).replace(uid=["trial", "trial"])
    truth = (item.get("reward_model") or {}).get("ground_truth")
    truth = "" if truth is None else str(truth)
    right = tokenizer.encode(truth, add_special_tokens=False) or [tokenizer.eos_token_id]
    prompt_ids = list(prompts.non_tensor_batch["prompt_ids"])
    columns = build_sequences(prompt_ids, [right, prompt_ids[0]], tokenizer.pad_token_id)
    return prompts.union(DataProto.from_dict(columns))


def _score_trial(manager: RewardManager, batch: DataProto) -> dict[str, Any]:
    try:
        return manager(batch, return_dict=True)
    except Exception as error:
        stack = traceback.extract_tb(error.__cause__.__traceback__) if error.__cause__ else []
        for frame in stack[-1:]:
            error.add_note(f"raised at {frame.filename}:{frame.lineno}: {frame.line}")
        error.add_note(
            "found by a trial before training: the ground truth and the prompt of the first row, scored as responses"
        )
        raise
