"""What a trainer prepares before a model is loaded."""

import logging
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from verl.algorithms.advantages import get_adv_estimator_fn
from verl.algorithms.binding import missing_settings
from verl.algorithms.policy_losses import SELECTS_PER_MICRO_BATCH, get_policy_loss_fn
from verl.checkpoints.atomic import check_folder
from verl.config import ConfigError, Problem, check_critic, schema
from verl.data.rlhf_dataset import RLHFDataset, collate_prompts, load_dataset_class
from verl.data.sequences import build_sequences
from verl.protocol import DataProto
from verl.registry import did_you_mean, import_module
from verl.rewards import RewardManager, load_reward_manager
from verl.trainer.launch import Recipe
from verl.trainer.model_limits import ModelLimits
from verl.trainer.ppo_flow import needs_critic

logger = logging.getLogger("verl.trainer")


def base_config(recipe: Recipe, train: Dataset | None, val: Dataset | None) -> dict[str, Any]:
    """What stands below the user's settings: those of the recipe, and the files of datasets given as objects."""
    given = {"data.train_files": train, "data.val_files": val}
    files = {key: list(d.data_files) for key, d in given.items() if isinstance(d, RLHFDataset)}
    return recipe.read() | files


def check_one_host(trainer: schema.TrainerConfig | schema.SFTTrainerConfig) -> None:
    """Several hosts need Ray, and who asks for Ray does not get something else."""
    if trainer.backend != "local":
        raise ValueError(
            f"trainer.backend is {trainer.backend}, but this trainer does not use it: set trainer.backend=local "
            "(RayPPOTrainer is the one that does)"
        )
    if trainer.nnodes > 1:
        raise ValueError(
            f"trainer.nnodes is {trainer.nnodes}, but this trainer runs on one host: set trainer.nnodes=1 "
            "(main_ppo with trainer.backend=ray, or RayPPOTrainer, runs on several)"
        )


def check_validation(trainer: schema.TrainerConfig | schema.SFTTrainerConfig, dataset: Dataset | None) -> None:
    """Validation that is asked for by name needs rows."""
    asked = "trainer.val_only=true" if trainer.val_only else f"trainer.test_freq={trainer.test_freq}"
    if dataset is None and (trainer.val_only or trainer.test_freq > 0):
        raise ValueError(f"{asked} asks for validation, but there are no data.val_files: give them, or leave it out")


def check_folders(trainer: schema.TrainerConfig | schema.SFTTrainerConfig) -> None:
    """Everything that is written has a folder that can be written to."""
    for name, path in trainer.model_dump().items():
        if name in ("default_local_dir", "rollout_data_dir", "validation_data_dir") and path:
            check_folder(f"trainer.{name}", Path(path))


def check_model_fits(config: schema.Config, tokenizer: Any, dataset: Dataset) -> int:
    """The model has an embedding for every token that it will be given, and a position for the longest answer; the
    engine of `rollout.name` generates with it.

    Returns the size of its vocabulary. Of a dataset of another class than RLHFDataset the first item is looked at.
    """
    rollout, limits = config.actor_rollout_ref.rollout, ModelLimits.of(config.actor_rollout_ref.model)
    if isinstance(dataset, RLHFDataset):
        largest, longest = dataset.largest_token_id, dataset.longest_prompt
    else:
        prompt = collate_prompts([dataset[0]]).non_tensor_batch["prompt_ids"][0]
        largest, longest = max(prompt), len(prompt)
    limits.check_vocabulary(tokenizer, largest)
    limits.check_engine(rollout.name)
    limits.check_answers(
        longest,
        rollout.response_length,
        "data.max_response_length",
        "leave out longer prompts (data.max_prompt_length with data.filter_overlong_prompts=true)",
    )
    return limits.vocab_size


def import_extensions(config: schema.Config | schema.SFTConfig) -> None:
    """Import the user's own files and modules, which register losses, estimators and rewards."""
    for address in config.imports:
        import_module(address)


def check_group_size(config: schema.Config) -> None:
    """An estimator that compares the answers to one prompt needs several of them."""
    n = config.actor_rollout_ref.rollout.n
    estimator = get_adv_estimator_fn(config.algorithm.adv_estimator)
    if n < estimator.min_group_size:
        raise ValueError(
            f"algorithm.adv_estimator={config.algorithm.adv_estimator} compares the answers to one prompt: "
            f"actor_rollout_ref.rollout.n must be at least {estimator.min_group_size}, found {n}"
        )


def check_critic_setting(config: schema.Config) -> None:
    """critic.enable must fit the estimator, which decides whether values are needed."""
    problems = list(check_critic(config, needs_critic(config)))
    if problems:
        raise ConfigError(problems)


def check_reward_model(config: schema.Config) -> None:
    """A reward model that is asked for has a path."""
    key = "reward.reward_model"
    if config.reward.reward_model.enable and not config.reward.reward_model.model_path:
        raise ConfigError([Problem(f"{key}.model_path", f"null, but {key}.enable is true: which model scores?")])


def check_settings(config: schema.Config) -> None:
    """The estimator and the loss have a value for every setting that they cannot do without."""
    actor = config.actor_rollout_ref.actor
    chosen = {
        f"algorithm.adv_estimator={config.algorithm.adv_estimator}": (
            get_adv_estimator_fn(config.algorithm.adv_estimator),
            config.algorithm.model_dump(),
            "algorithm",
        ),
        f"policy_loss.loss_mode={actor.policy_loss.loss_mode}": (
            get_policy_loss_fn(actor.policy_loss.loss_mode),
            {
                **actor.model_dump(),
                **actor.policy_loss.model_dump(),
                **config.algorithm.rollout_correction.model_dump(),
            },
            "actor_rollout_ref.actor",
        ),
    }
    for name, (function, settings, section) in chosen.items():
        missing = missing_settings(function, settings)
        if missing:
            raise ValueError(f"{name} needs the setting {missing[0]!r}: give it in the section {section}")


def warn_of_choice_in_parts(config: schema.Config) -> None:
    """Two losses choose tokens among those of one micro-batch: said where that is a part of a mini-batch."""
    actor, rollout, trainer = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout, config.trainer
    loss = actor.policy_loss.loss_mode
    if loss not in SELECTS_PER_MICRO_BATCH:
        return
    rows = actor.ppo_mini_batch_size * rollout.n // (trainer.nnodes * trainer.n_gpus_per_node)
    whole = actor.ppo_micro_batch_size_per_gpu is not None and actor.ppo_micro_batch_size_per_gpu >= rows
    if actor.use_dynamic_bsz or not whole:
        logger.warning(
            "actor.policy_loss.loss_mode=%s chooses among the tokens of one micro-batch, so its gradient depends on "
            "how a mini-batch is cut; uncut: actor.ppo_micro_batch_size_per_gpu=%d and actor.use_dynamic_bsz=false",
            loss,
            rows,
        )


def stop_token_ids(model_path: str, tokenizer: Any) -> tuple[int, ...]:
    """The ids that end an answer: the tokenizer's end token and those of the model's generation config (or config)."""
    from transformers import AutoConfig, GenerationConfig

    ids = [tokenizer.eos_token_id]
    if (Path(model_path) / "generation_config.json").is_file() or not Path(model_path).is_dir():
        found = GenerationConfig.from_pretrained(model_path).eos_token_id
    else:
        found = AutoConfig.from_pretrained(model_path).eos_token_id
    ids += found if isinstance(found, list) else [found] if found is not None else []
    return tuple(dict.fromkeys(ids))


def dataset_class(config: schema.Config | schema.SFTConfig, usual: type[Dataset]) -> type[Dataset]:
    """The user's own class of rows, or the usual one."""
    custom = config.data.custom_cls
    return load_dataset_class(custom.path, custom.name) if custom.path else usual


def _dataset(config: schema.Config, tokenizer: Any, files: Sequence[str], max_samples: int) -> Dataset:
    settings = config.data.model_dump() | {"train_max_samples": max_samples}
    return dataset_class(config, RLHFDataset)(data_files=list(files), tokenizer=tokenizer, config=settings)


def load_dataset(config: schema.Config, tokenizer: Any) -> Dataset:
    """The training prompts."""
    return _dataset(config, tokenizer, config.data.train_files, config.data.train_max_samples)


def load_val_dataset(config: schema.Config, tokenizer: Any) -> Dataset | None:
    """The validation prompts; None when there are no files."""
    files = config.data.val_files
    return _dataset(config, tokenizer, files, config.data.val_max_samples) if files else None


def load_rewards(config: schema.Config, tokenizer: Any) -> RewardManager:
    """The reward manager that the `reward` section describes."""
    reward = config.reward
    function, manager = reward.custom_reward_function, reward.reward_manager
    if function.name != "compute_score" and not function.path:
        raise ValueError(
            f"reward.custom_reward_function.name is {function.name!r}, but reward.custom_reward_function.path does not "
            "say which file it is in: give the path too"
        )
    registered = reward.reward_function
    if reward.reward_model.enable and not (registered or function.path):
        registered = "model_score"
    loaded = load_reward_manager(
        tokenizer=tokenizer,
        manager=manager.name,
        manager_path=manager.module.path,
        function_path=function.path,
        function_name=function.name if function.path else None,
        registered_function=registered,
        reward_kwargs=function.reward_kwargs,
        manager_kwargs={
            **reward.reward_kwargs,
            "on_error": reward.on_error,
            "failure_score": reward.failure_score,
            "timeout": reward.timeout,
        },
        reward_fn_key=config.data.reward_fn_key,
    )
    if reward.reward_model.enable and not loaded.compute_score.takes_extra_info:
        raise ValueError(
            f"reward.reward_model.enable is true, but the reward function {loaded.compute_score.where} takes no "
            "extra_info, where the model's score stands (extra_info['rm_score']): let it take extra_info, or leave the "
            "function out, and the model's score is the reward"
        )
    return loaded


def try_rewards(manager: RewardManager, dataset: Dataset, tokenizer: Any, with_model: bool) -> set[str]:
    """Score two made-up answers to the first row, its ground truth and its prompt: one right, one wrong as a rule.

    A reward function that cannot score fails here, not after the model is loaded and the first batch generated.
    with_model: there will be scores of a reward model. Here they are made up, once 0 and once 1, and rewards that are
    the same both times bring a warning: the model would be run for nothing.
    Returns the names of the figures that come with the score.
    """
    item = dataset[0]
    prompts = collate_prompts([item, item]).replace(uid=["trial", "trial"])
    truth = str((item.get("reward_model") or {}).get("ground_truth", ""))
    right = tokenizer.encode(truth, add_special_tokens=False) or [tokenizer.eos_token_id]
    prompt_ids = list(prompts.non_tensor_batch["prompt_ids"])
    columns = build_sequences(prompt_ids, [right, prompt_ids[0]], tokenizer.pad_token_id)
    batch = prompts.union(DataProto.from_dict(columns))
    if not with_model:
        return set(_try(manager, batch)["reward_extra_info"])
    zeros = torch.zeros(columns["responses"].shape)
    ones = zeros.clone()
    ones[:, 0] = 1.0
    first, second = (_try(manager, batch.union(DataProto.from_dict({"rm_scores": made}))) for made in (zeros, ones))
    if torch.equal(first["reward_tensor"], second["reward_tensor"]):
        logger.warning(
            "THE REWARD MODEL'S SCORE CHANGES NOTHING in a trial of the reward function %s, with scores 0 and 1: "
            "the function gets it as extra_info['rm_score'], and it is used nowhere else. Let the function read it, "
            "or leave the function out (then the score is the reward), or set reward.reward_model.enable=false",
            manager.compute_score.where,
        )
    return set(first["reward_extra_info"])


def check_reward_names(config: schema.Config, given: set[str], columns: set[str]) -> None:
    """What is asked for by the name of a figure beside the score is given with it, or written by an operator.

    given: the names that the reward function returns. columns: what the operators write.
    """
    algorithm = config.algorithm
    asked: dict[str, list[str]] = {}
    if algorithm.filter_groups.enable:
        asked["algorithm.filter_groups.metric"] = [algorithm.filter_groups.metric]
    if algorithm.adv_estimator == "gdpo":
        asked["algorithm.gdpo_reward_keys"] = algorithm.gdpo_reward_keys
    known = {"reward", *given}
    for key, names in asked.items():
        for name in names:
            if name not in known and not {name, f"reward_{name}"} & columns:
                raise ValueError(f"{key}: the reward function does not return {name!r}: {did_you_mean(name, known)}")


def _try(manager: RewardManager, batch: DataProto) -> dict[str, Any]:
    """What the manager says of made-up answers; an error says that they were made up."""
    try:
        return manager(batch, return_dict=True)
    except Exception as error:
        stack = traceback.extract_tb(error.__cause__.__traceback__) if error.__cause__ else []
        for frame in stack[-1:]:
            error.add_note(f"raised at {frame.filename}:{frame.lineno}: {frame.line}")
        error.add_note("found by a trial before training: the first row's ground truth and prompt, scored as answers")
        raise


def joined(pieces: Sequence[DataProto], name: str) -> np.ndarray:
    """One object column of several batches, one after another."""
    return np.concatenate([piece.non_tensor_batch[name] for piece in pieces])


def predictions(pieces: Sequence[DataProto]) -> np.ndarray | None:
    """The extracted answers, where the reward function returns them as `pred`."""
    if not all("reward_pred" in piece for piece in pieces):
        return None
    return joined(pieces, "reward_pred")
