"""Checks of the loaded inputs, and of the reward values that the compiled flow writes."""

import logging
import os
import re
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from verl.agents.loop import NO_TRAJECTORY_INFO
from verl.algorithms.advantages import get_adv_estimator_fn
from verl.algorithms.binding import parameter_names
from verl.config import schema
from verl.data.collate import check_dataset
from verl.data.rlhf_dataset import RLHFDataset, check_ground_truth
from verl.data.sequences import build_sequences
from verl.protocol import DataProto
from verl.registry import did_you_mean, load_object
from verl.rewards import RewardError, RewardManager
from verl.rewards.sandbox.pool import WorkerError
from verl.rewards.trial import describe_fault, trial_responses
from verl.trainer.checks.models import ModelLimits, check_reads_tokens_of
from verl.trainer.checks.preflight import Run
from verl.trainer.startup.inputs import Inputs
from verl.trainer.startup.roles import roles_of

logger = logging.getLogger("verl.trainer")

#: rows of a data source that are tried until the reward function scores one
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
    if isinstance(dataset, RLHFDataset) and dataset.is_tokenized:
        largest, longest = dataset.largest_token_id, dataset.longest_prompt
    else:
        prompt = inputs.collate([dataset[0]]).non_tensor_batch["prompt_ids"][0]
        largest, longest = max(prompt), len(prompt)
        lengths = config.data.max_prompt_length, config.data.max_response_length
        if limits.positions is not None and sum(lengths) > limits.positions:
            text = "prompts of %d and responses of %d tokens exceed the model's %d positions (max_position_embeddings)"
            logger.warning(text, *lengths, limits.positions)
    limits.check_vocabulary(inputs.tokenizer, largest)
    if "critic" in roles_of(config):
        check_reads_tokens_of(limits.path, inputs.tokenizer, config.critic.model, "critic", largest)
    for teacher in config.distillation.teachers_by_key.values():
        _check_teacher(config, inputs, teacher, largest)
    if config.actor_rollout_ref.rollout.mode == "server":  # agents write their own prompts
        longest = max(longest, config.actor_rollout_ref.rollout.prompt_length)
    limits.check_engine(config.actor_rollout_ref.rollout)
    teachers = [ModelLimits.from_config(each.model) for each in config.distillation.local_teachers.values()]
    for model in (limits, *teachers):
        model.check_response_length(
            longest,
            config.actor_rollout_ref.rollout.response_length,
            "data.max_response_length",
            "filter longer prompts (data.max_prompt_length with data.filter_overlong_prompts=true)",
        )


def _check_teacher(config: schema.Config, inputs: Inputs, teacher: schema.TeacherConfig, largest_id: int) -> None:
    """A teacher reads the tokens of the policy. The model of a server is not known here, unless it is a folder."""
    if teacher.server_url is not None and not os.path.isdir(teacher.model_path):
        return
    check_reads_tokens_of(inputs.limits.path, inputs.tokenizer, teacher.model, "teacher", largest_id)
    count, vocab_size = config.distillation.num_candidates, ModelLimits.from_config(teacher.model).vocab_size
    if count is not None and count > vocab_size:
        key = "distillation.distillation_loss.topk"
        raise ValueError(f"{key}: found {count}, but the vocabulary of {teacher.model_path!r} has {vocab_size} tokens")


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
    """The data has what the reward function needs, and the function scores trial responses for every data source.

    The sources are those of all rows of training and validation (of a custom dataset, of its first item). The responses
    are right, wrong and empty (`trial_responses`); a score that does not tell them apart is a warning. If the function
    fails, but may fail for some rows (`reward.on_error`), the next two rows are tried. With a reward model, the trial
    uses its scores 0 and 1; if the reward is the same for both, a warning is logged.
    """
    inputs, manager = run.inputs, run.inputs.reward_manager
    is_scored = run.recipe.scores_training is None or run.recipe.scores_training(run.config)
    scored = (inputs.train_dataset if is_scored else None, inputs.val_dataset)
    datasets = [each for each in scored if each is not None]
    function = manager.compute_score
    if function.needs_ground_truth or (not function.is_builtin and function.accepts("ground_truth")):
        for dataset in datasets:
            check_ground_truth(dataset, f"the reward function {function.name}", function.needs_ground_truth)
    by_source = [(dataset, _items_by_source(inputs, dataset, manager.reward_fn_key)) for dataset in datasets]
    counts = sum((Counter({source: len(items[source]) for source in items}) for _, items in by_source), Counter())
    rows = "rows per data source: " + ", ".join(f"{source!r} {count:,}" for source, count in counts.items())
    logger.info("%s", rows)
    first = {source: (dataset, items[source]) for dataset, items in reversed(by_source) for source in items}
    for source, (dataset, items) in first.items():
        try:
            manager.compute_score.for_data_source(source)
        except ValueError as error:
            if load_object("verl.agents.public", "may_score")(run.config.actor_rollout_ref.rollout.agent):
                logger.warning("REWARD: the agent loop must return reward_score: %s", error)
                return
            raise ValueError(f"{_location(dataset, items[0])}: {error}\n{rows}") from None
    for source, (dataset, items) in first.items():
        run.reward_values |= _try_source(run, dataset, source, items)


def _items_by_source(inputs: Inputs, dataset: Any, key: str) -> Mapping[str, Sequence[int]]:
    if isinstance(dataset, RLHFDataset):
        return dataset.items_by_source()
    first = inputs.collate([dataset[0]]).non_tensor_batch
    return {str(first[key][0]): range(min(_TRIAL_ROWS, len(dataset)))} if key in first else {}


def _location(dataset: Any, item: int) -> str:
    return dataset.dataframe.location(int(item)) if isinstance(dataset, RLHFDataset) else f"item {item} of the dataset"


def _try_source(run: Run, dataset: Any, source: str, items: Sequence[int]) -> set[str]:
    """Score trial responses to the first row of a data source that can be scored. Returns the names of the values."""
    items = items[: 1 if run.inputs.reward_manager.on_error == "raise" else _TRIAL_ROWS]
    for item in items:
        try:
            return _try_item(run, dataset[int(item)], source, _location(dataset, item))
        except RewardError as error:
            if item == items[-1]:
                raise
            logger.warning("the reward function fails for %s: %s", _location(dataset, item), error)
    return set()


def _try_item(run: Run, item: Mapping[str, Any], source: str, location: str) -> set[str]:
    manager = run.inputs.reward_manager
    kinds, batch = _trial_batch(run.inputs, item)
    reads_score = manager.compute_score.name == "agent_score"
    if reads_score or run.config.actor_rollout_ref.rollout.mode == "server":
        from verl.server.agents import TRIAL_INFO

        batch = batch.replace(trajectory_info=[dict(TRIAL_INFO) for _ in range(len(batch))])
    if run.config.reward.reward_model.enable:
        return _try_reward_model(manager, batch)
    result = _score_trial(manager, batch)
    pairs = [*zip(kinds, result["reward_tensor"].sum(1).tolist())]
    scores = {kind: [score for k, score in pairs if k == kind] for kind in dict(pairs)}
    failed = reads_score or result["metrics"]["reward/failed_rows"]
    if not failed and (fault := describe_fault(scores)):
        logger.warning(
            "REWARD: %s, data source %r: %s. Tried on %s, with responses made from its ground truth: if the function "
            "expects another form of response, ignore this. `verl rewards test DATA` prints responses and scores",
            *(manager.compute_score.for_data_source(source).location, source, fault, location),
        )
    return set(result["reward_extra_info"])


def _try_reward_model(manager: RewardManager, batch: DataProto) -> set[str]:
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


def _trial_batch(inputs: Inputs, item: Mapping[str, Any]) -> tuple[list[str], DataProto]:
    """The kinds of the trial responses to an item, without those that the tokenizer cannot write, and their batch."""
    tokenizer = inputs.tokenizer
    solution = (item.get("extra_info") or {}).get("solution")
    responses = trial_responses((item.get("reward_model") or {}).get("ground_truth"), solution)
    encoded = [
        (kind, text, tokenizer.encode(text, add_special_tokens=False)) for kind in responses for text in responses[kind]
    ]
    encoded = [(k, ids) for k, text, ids in encoded if tokenizer.decode(ids, skip_special_tokens=True) == text]
    prompts = inputs.collate([item] * len(encoded)).replace(
        uid=["trial"] * len(encoded), trajectory_info=[NO_TRAJECTORY_INFO] * len(encoded)
    )
    ids = [ids or [tokenizer.eos_token_id] for _, ids in encoded]
    columns = build_sequences(list(prompts.non_tensor_batch["prompt_ids"]), ids, tokenizer.pad_token_id)
    return [kind for kind, _ in encoded], prompts.union(DataProto.from_dict(columns))


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
            "found by a trial before training: right, wrong and empty responses to a row, made from its ground truth"
        )
        raise
