"""Inputs that a trainer loads before any model: tokenizer, datasets, reward manager. `preflight` checks them."""

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset, Sampler

from verl.agents.loop import score_group_of
from verl.config import schema
from verl.data.collate import TOKEN_KEYS, PromptCollator, collate_prompts
from verl.data.dataset import TokenizedDataset
from verl.data.media import note_unused_media_keys
from verl.data.order import CustomOrder, PromptSource, WeightedOrder
from verl.data.processor import load_processor
from verl.data.rlhf_dataset import RLHFDataset, create_custom_dataset, load_dataset_class
from verl.data.tokenization import load_tokenizer
from verl.modeling.huggingface import model_source
from verl.processes.child import set_helper_environment
from verl.protocol import DataProto
from verl.registry import import_module, load_object
from verl.rewards import RewardManager, as_reward_manager, load_reward_manager
from verl.rewards.functions import check_registered
from verl.rewards.managers import NaiveRewardManager
from verl.trainer.checks.models import ModelLimits
from verl.utils.data_names import with_split

if TYPE_CHECKING:
    from verl.trainer.checks.preflight import Run

logger = logging.getLogger("verl.trainer")

#: keys of an item that is tokenized, or that the trainer tokenizes
RL_TOKENS = (*TOKEN_KEYS, "raw_prompt")
SFT_TOKENS = ("response_ids", "samples")


@dataclass
class Inputs:
    """The loaded inputs of a run.

    reward_manager: None for SFT. collate: items of a dataset -> a batch of prompts. processor: that of a
    vision-language model; None for text. sampler: decides the order of the prompts; None: data.shuffle and data.seed.
    """

    model: schema.ModelConfig
    tokenizer: Any
    train_dataset: Dataset
    val_dataset: Dataset | None
    reward_manager: RewardManager | None = None
    collate: Callable[[list[dict[str, Any]]], DataProto] = collate_prompts
    processor: Any = None
    sampler: Sampler[int] | None = None

    @functools.cached_property
    def limits(self) -> ModelLimits:
        return ModelLimits.from_config(self.model)


def load_inputs(run: "Run", tokenizer: Any = None) -> Inputs:
    """Load the inputs that are not given as objects. tokenizer: None: that of the model."""
    config, train_dataset = run.config, run.train_dataset
    set_helper_environment(config.trainer.worker_env)
    model = config.actor_rollout_ref.model
    if tokenizer is None and isinstance(train_dataset, RLHFDataset):
        tokenizer = train_dataset.tokenizer
    tokenizer = tokenizer if tokenizer is not None else load_tokenizer(model)
    processor = load_processor(model, tokenizer)
    note_unused_media_keys(config.data, processor)
    rewards = load_rewards(config, tokenizer) if run.reward is None else given_rewards(config, tokenizer, run.reward)
    train = as_dataset(config, tokenizer, train_dataset, config.data.train_max_samples, processor)
    val = as_dataset(config, tokenizer, run.val_dataset, config.data.val_max_samples, processor)
    data, readers = config.data, (tokenizer, processor)
    if train is None:
        train = dataset_of_files(data, data.train_files, data.train_max_samples, *readers)
    if val is None and data.val_files:
        files = [with_split(file, "test") for file in data.val_files]
        # a validation is on all of its rows
        val = dataset_of_files(data.model_copy(update={"max_bad_rows": 0}), files, data.val_max_samples, *readers)
    collate = PromptCollator(tokenizer, data, processor)
    return Inputs(model, tokenizer, train, val, rewards, collate, processor, load_sampler(data, train))


def load_sft_inputs(
    run: "Run", tokenizer: Any, default: type[TokenizedDataset], collate: Callable[..., DataProto]
) -> Inputs:
    """Like `load_inputs`, for SFT. default: the dataset class; collate: (items, pad_token_id) -> a batch."""
    config, data, cls = run.config, run.config.data, dataset_class(run.config.data, default)
    tokenizer = tokenizer if tokenizer is not None else load_tokenizer(config.model)
    processor = load_processor(config.model, tokenizer)
    note_unused_media_keys(data, processor)

    def load(files: Sequence[str], max_samples: int) -> Dataset:
        if data.custom_cls.path:
            settings = data.model_dump()
            return create_custom_dataset(
                cls, files, tokenizer, settings, max_samples, schema="sft", processor=processor
            )
        return cls(files, tokenizer, data.model_dump() | {"max_samples": max_samples}, processor=processor)

    train, val = (
        cls(dataset, tokenizer, data, processor=processor) if are_rows(dataset, SFT_TOKENS) else dataset
        for dataset in (run.train_dataset, run.val_dataset)
    )
    if train is None:
        train = load(data.train_files, data.train_max_samples)
    if val is None and data.val_files:
        data = data.model_copy(update={"max_bad_rows": 0})  # a validation is on all of its rows
        val = load([with_split(file, "test") for file in data.val_files], data.val_max_samples)
    collate = functools.partial(collate, pad_token_id=tokenizer.pad_token_id)
    return Inputs(config.model, tokenizer, train, val, collate=collate, processor=processor)


def files_of_datasets(train: Dataset | None, val: Dataset | None) -> dict[str, list[str]]:
    """The settings of the files of datasets given as objects."""
    datasets = {"data.train_files": train, "data.val_files": val}
    return {key: list(each.data_files) for key, each in datasets.items() if isinstance(each, RLHFDataset)}


def stop_token_ids(model_path: str, tokenizer: Any) -> tuple[int, ...]:
    """Token ids that end a response: the eos token of the tokenizer and those of the model's generation config or
    config."""
    from transformers import AutoConfig, GenerationConfig

    ids, model_path = [tokenizer.eos_token_id], model_source(model_path)
    if (Path(model_path) / "generation_config.json").is_file() or not Path(model_path).is_dir():
        eos = GenerationConfig.from_pretrained(model_path).eos_token_id
    else:
        eos = AutoConfig.from_pretrained(model_path).eos_token_id
    ids += eos if isinstance(eos, list) else [eos] if eos is not None else []
    return tuple(dict.fromkeys(ids))


def dataset_class(data: schema.DataConfig | schema.SFTDataConfig, default: type[Dataset]) -> type[Dataset]:
    """The custom dataset class of `data.custom_cls`, or the default."""
    return load_dataset_class(data.custom_cls.path, data.custom_cls.name) if data.custom_cls.path else default


def dataset_of_files(
    data: schema.DataConfig, files: Sequence[str], max_samples: int, tokenizer: Any, processor: Any = None
) -> Dataset:
    """The dataset of prompts in files: RLHFDataset, or the class of `data.custom_cls`."""
    cls, settings = dataset_class(data, RLHFDataset), data.model_dump()
    if data.custom_cls.path:
        return create_custom_dataset(cls, files, tokenizer, settings, max_samples, processor=processor)
    return cls(list(files), tokenizer, settings, processor=processor, max_samples=max_samples)


def reading_threads(dataset: Dataset, data: schema.DataConfig | schema.SFTDataConfig) -> int:
    """The number of threads that prepare the next batches (`data.dataloader_num_workers`). Items of a custom dataset
    are read by at most one, since several threads may not be safe there."""
    is_custom = not type(dataset).__module__.startswith("verl.data.")  # also of a subclass
    threads = data.dataloader_num_workers
    if threads is None:
        if is_custom or dataset.media is None:
            return 0
        from verl.data.prefetch import default_workers

        return default_workers()
    if is_custom and threads > 1:
        logger.info("data.dataloader_num_workers=%d: the items of a custom dataset are read by one thread", threads)
        return 1
    return threads


def load_sampler(data: schema.DataConfig, dataset: Dataset) -> Sampler[int] | None:
    """The sampler of `data.sampler`; None without one."""
    if not data.sampler.class_path:
        return None
    cls = load_object(data.sampler.class_path.removeprefix("pkg://"), data.sampler.class_name)
    return cls(data_source=dataset, data_config=data)


def prompt_source(data: schema.DataConfig | schema.SFTDataConfig, inputs: Inputs) -> PromptSource:
    size, dataset, order = data.train_batch_size, inputs.train_dataset, None
    weights = data.get("train_weights")
    if weights and (inputs.sampler is not None or not (isinstance(dataset, RLHFDataset) and dataset.is_tokenized)):
        kind = f"the sampler {type(inputs.sampler).__name__}" if inputs.sampler is not None else "a custom dataset"
        raise ValueError(
            f"data.train_weights: expected rows of data.train_files and no sampler, found {kind}: remove one"
        )
    if weights:
        order = WeightedOrder(dataset.items_by_file(), weights, size, seed=data.seed, shuffle=data.shuffle)
    if inputs.sampler is not None:
        order = CustomOrder(inputs.sampler, len(dataset), size)
    return PromptSource(
        dataset,
        size,
        seed=data.seed,
        shuffle=data.shuffle,
        sampler=order,
        collate=inputs.collate,
        # the order of a sampler may depend on the steps
        workers=reading_threads(dataset, data) if inputs.sampler is None else 0,
        batches_ahead=-(-(data.get("gen_batch_size") or size) // size),
    )


def are_rows(data: Any, tokenized: Sequence[str] = RL_TOKENS) -> bool:
    """Whether these are rows of a table rather than a dataset whose items the trainer takes.

    Args:
        data: anything with a length whose items are dicts.
        tokenized: keys that only an item of a dataset has.

    Raises:
        ValueError: it has no length or no items.
    """
    if data is None or isinstance(data, RLHFDataset):
        return False
    try:
        size = len(data)
    except TypeError:
        raise ValueError(
            f"dataset: expected a list of dicts, a dataset with a length, or paths, found {type(data).__name__}"
        ) from None
    if isinstance(data, Mapping):
        raise ValueError(
            f"dataset: expected one split, found {type(data).__name__} with the keys {', '.join(map(str, data))}"
        )
    if size == 0:
        if isinstance(data, Dataset):
            return False  # reported by the check of its items
        raise ValueError("dataset: expected at least one row, found none")
    first = data[0]
    if isinstance(data, list | tuple) and not isinstance(first, Mapping):
        return True  # reported by `rows_in_memory`
    return isinstance(first, Mapping) and not any(key in first for key in tokenized)


def as_dataset(config: schema.Config, tokenizer: Any, data: Any, max_samples: int, processor: Any = None) -> Any:
    """The dataset of rows; a dataset as it is."""
    if not are_rows(data) or (isinstance(data, Dataset) and config.data.prompt_key not in data[0]):
        return data
    rows = [data[i] for i in range(len(data))]
    return RLHFDataset(
        rows, tokenizer, config.data, processor, max_samples=len(rows) if max_samples < 0 else max_samples
    )


def given_rewards(config: schema.Config, tokenizer: Any, reward: Any) -> RewardManager:
    """Return the reward manager for an object passed to a trainer: a manager, or a reward function of any form."""
    kwargs, key = config.reward.custom_reward_function.reward_kwargs, config.data.reward_fn_key
    return as_reward_manager(reward, tokenizer, kwargs, reward_fn_key=key, **_limits_of(config.reward))


def _limits_of(reward: schema.RewardConfig) -> dict[str, Any]:
    names = ("on_error", "failure_score", "timeout", "isolation", "memory_limit_mb", "retries", "max_failure_rate")
    return {name: reward[name] for name in names}


def load_rewards(config: schema.Config, tokenizer: Any) -> RewardManager:
    """The reward manager that the `reward` section describes."""
    reward = config.reward
    function, manager = reward.custom_reward_function, reward.reward_manager
    if function.name != "compute_score" and not function.path:
        raise ValueError(
            f"reward.custom_reward_function.name is {function.name!r}, but reward.custom_reward_function.path is null: "
            "set it to the file that defines the function"
        )
    registered, score_group = reward.reward_function, score_group_of(config.actor_rollout_ref.rollout.agent)
    check_registered(registered, [import_module(address) for address in config.imports])
    if reward.reward_model.enable and not (registered or function.path):
        registered = "model_score"
    elif (score_group or config.actor_rollout_ref.rollout.mode == "server") and not (registered or function.path):
        registered = "agent_score"
    loaded = load_reward_manager(
        tokenizer=tokenizer,
        manager=manager.name,
        manager_path=manager.module.path,
        function_path=function.path,
        function_name=function.name if function.path else None,
        registered_function=registered,
        reward_kwargs=function.reward_kwargs,
        manager_kwargs={**reward.reward_kwargs, **_limits_of(reward)},
        reward_fn_key=config.data.reward_fn_key,
        config=config.model_dump(),
    )
    if score_group is not None and not isinstance(loaded, NaiveRewardManager):
        raise ValueError(f"score_group of the agent loop: expected a NaiveRewardManager, found {type(loaded).__name__}")
    if score_group is not None:
        loaded.score_group = score_group
    if reward.reward_model.enable and not loaded.compute_score.accepts_extra_info:
        raise ValueError(
            f"reward.reward_model.enable is true, but the reward function {loaded.compute_score.location} does not "
            "take extra_info, which holds the score of the model (extra_info['rm_score']): add the parameter "
            "extra_info, or remove the function, and the score of the model is the reward"
        )
    return loaded
