"""Checks of the loaded inputs, and of the reward values that the compiled flow writes."""

import logging
import re
import traceback
from collections.abc import Mapping
from typing import Any

import torch

from verl.agents.loop import NO_TRAJECTORY_INFO
from verl.algorithms.advantages import get_adv_estimator_fn
from verl.algorithms.binding import parameter_names
from verl.config import schema
from verl.data.collate import check_dataset
from verl.data.mixture import datasets_of
from verl.data.rlhf_dataset import RLHFDataset, check_ground_truth
from verl.data.sequences import build_sequences
from verl.protocol import DataProto
from verl.registry import did_you_mean
from verl.rewards import RewardError, RewardManager
from verl.rewards.sandbox.pool import WorkerError
from verl.trainer.checks.model_limits import check_reads_tokens_of
from verl.trainer.checks.preflight import Run
from verl.trainer.startup.inputs import Inputs
from verl.trainer.startup.roles import roles_of

logger = logging.getLogger("verl.trainer")

#: rows that are tried until the reward function scores one
_TRIAL_ROWS = 3


def check_items(run: Run) -> None:
    """The first item of each dataset has the required keys."""
    for dataset in (run.inputs.train_dataset, run.inputs.val_dataset):
        if dataset is not None:
            check_dataset(dataset, run.inputs.collate)


def check_validation_data(run: Run) -> None:
    """If validation is requested, there is validation data."""
    trainer = run.config.trainer
    setting = "trainer.val_only=true" if trainer.val_only else f"trainer.test_freq={trainer.test_freq}"
    if run.inputs.val_dataset is None and (trainer.val_only or trainer.test_freq not in (-1, 0)):
        raise ValueError(f"{setting} requests validation, but data.val_files is empty: set it, or remove {setting}")


def check_model_limits(run: Run) -> None:
    """Token ids, lengths and the rollout engine fit the model. Of a custom dataset, only the first item is checked."""
    config, inputs, limits = run.config, run.inputs, run.inputs.limits
    dataset = inputs.train_dataset
    if isinstance(config, schema.SFTConfig):
        from verl.data.sft_dataset import SFTDataset

        if isinstance(dataset, SFTDataset):
            limits.check_vocabulary(inputs.tokenizer, dataset.largest_token_id)
            limits.check_sequence_length(dataset.longest_row, "data.max_length")
        return
    parts = datasets_of(dataset)
    if all(isinstance(part, RLHFDataset) and part.is_tokenized for part in parts):
        largest, longest = max(part.largest_token_id for part in parts), max(part.longest_prompt for part in parts)
    else:
        prompt = inputs.collate([dataset[0]]).non_tensor_batch["prompt_ids"][0]
        largest, longest = max(prompt), len(prompt)
    limits.check_vocabulary(inputs.tokenizer, largest)
    if "critic" in roles_of(config):
        check_reads_tokens_of(limits.path, inputs.tokenizer, config.critic.model, "critic", largest)
    if config.actor_rollout_ref.rollout.mode == "server":  # agents write their own prompts
        longest = max(longest, config.actor_rollout_ref.rollout.prompt_length)
    limits.check_engine(config.actor_rollout_ref.rollout)
    limits.check_response_length(
        longest,
        config.actor_rollout_ref.rollout.response_length,
        "data.max_response_length",
        "filter longer prompts (data.max_prompt_length with data.filter_overlong_prompts=true)",
    )


def check_recipe_inputs(run: Run) -> None:
    """The loaded data is valid for the recipe."""
    if run.recipe.check_inputs is not None:
        run.recipe.check_inputs(run.config, run.inputs)


def check_reward_names(run: Run) -> None:
    """Reward values that settings refer to are returned by the reward function or written by an operator."""
    algorithm = run.config.algorithm
    named: dict[str, list[str]] = {}
    if algorithm.filter_groups.enable:
        from verl.trainer.ppo.dynamic_sampling import SUMMED_REWARD

        if algorithm.filter_groups.metric not in SUMMED_REWARD:
            named["algorithm.filter_groups.metric"] = [algorithm.filter_groups.metric]
    if "gdpo_reward_keys" in parameter_names(get_adv_estimator_fn(algorithm.adv_estimator)):
        named["algorithm.gdpo_reward_keys"] = algorithm.gdpo_reward_keys or []
    known = {"reward", *run.reward_values}
    for key, names in named.items():
        for name in names:
            if name not in known and not {name, f"reward_{name}"} & run.columns:
                raise ValueError(f"{key}: the reward function does not return {name!r}: {did_you_mean(name, known)}")


# ---- a trial of the reward function ---------------------------------------------------------------------------------


def check_reward_function(run: Run) -> None:
    """The data has what the reward function needs, and the function scores two trial responses to the first prompt: its
    ground truth and the prompt itself.

    If the function fails for it, but may fail for some rows (`reward.on_error`), the next two rows are tried. With a
    reward model, the trial uses its scores 0 and 1; if the reward is the same for both, a warning is logged.
    """
    inputs, manager, agent_info = run.inputs, run.inputs.reward_manager, None
    uses_model = run.config.reward.reward_model.enable
    if run.config.actor_rollout_ref.rollout.mode == "server":
        from verl.server.agents import TRIAL_INFO as agent_info
    if manager.compute_score.needs_ground_truth:
        check_ground_truth(inputs.train_dataset, f"the reward function {manager.compute_score.name}")
    rows = 1 if manager.on_error == "raise" else min(_TRIAL_ROWS, len(inputs.train_dataset))
    for row in range(rows):
        try:
            run.reward_values = _try_row(inputs, row, uses_model, agent_info)
            return
        except RewardError as error:
            if row == rows - 1:
                raise
            logger.warning("the reward function fails for row %d of the training data: %s", row, error)


def _try_row(inputs: Inputs, row: int, uses_model: bool, info: Mapping[str, Any] | None) -> set[str]:
    manager, batch = inputs.reward_manager, _trial_batch(inputs, row)
    if info is not None:
        batch = batch.replace(trajectory_info=[dict(info) for _ in range(len(batch))])
    if not uses_model:
        return set(_score_trial(manager, batch)["reward_extra_info"])
    zeros = torch.zeros(batch.batch["responses"].shape)
    ones = zeros.clone()
    ones[:, 0] = 1.0
    scored = [batch.copy().union(DataProto.from_dict({"rm_scores": scores})) for scores in (zeros, ones)]
    first, second = (_score_trial(manager, each) for each in scored)
    if torch.equal(first["reward_tensor"], second["reward_tensor"]):
        logger.warning(
            "THE REWARD MODEL'S SCORE HAS NO EFFECT: the reward function %s returned the same for the scores 0 and 1. "
            "It gets the score as extra_info['rm_score'], and nothing else uses it. Read it in the function, or remove "
            "the function (then the score is the reward), or set reward.reward_model.enable=false",
            manager.compute_score.location,
        )
    return set(first["reward_extra_info"])


def _trial_batch(inputs: Inputs, row: int) -> DataProto:
    tokenizer, item = inputs.tokenizer, inputs.train_dataset[row]
    prompts = inputs.collate([item, item]).replace(
        uid=["trial", "trial"], trajectory_info=[NO_TRAJECTORY_INFO, NO_TRAJECTORY_INFO]
    )
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
        cause = error.__cause__
        stack = traceback.extract_tb(cause.__traceback__) if cause is not None else []
        lines = [(frame.filename, frame.lineno, frame.line) for frame in stack]
        if isinstance(cause, WorkerError):
            lines = re.findall(r'File "(.+)", line (\d+), in .*\n +(.*)', str(cause))
        for filename, number, line in lines[-1:]:
            error.add_note(f"raised at {filename}:{number}: {line}")
        error.add_note(
            "found by a trial before training: the ground truth and the prompt of a row, scored as responses"
        )
        raise
