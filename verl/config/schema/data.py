"""The configuration of data and of rewards."""

from typing import Any, Literal

from verl.config.fields import FilePath, FilePaths, Node, key, part
from verl.config.schema.model import EngineConfig


class CustomClassConfig(Node):
    """A class of the user's, by address."""

    path: FilePath | None = key(None, "Python file or module")
    name: str | None = key(None, "name of the class")


class DataConfig(Node):
    """`data`: prompts for training and validation."""

    train_files: FilePaths = key([], "training files: .parquet, .json, .jsonl")
    val_files: FilePaths = key([], "validation files")
    train_max_samples: int = key(-1, "use this many training rows; -1: all", ge=-1)
    val_max_samples: int = key(-1, "use this many validation rows; -1: all", ge=-1)
    train_batch_size: int = key(1024, "PROMPTS per training step", ge=1)
    gen_batch_size: int | None = key(None, "prompts per generation with filter_groups; null: train_batch_size", ge=1)
    val_batch_size: int | None = key(None, "prompts per validation batch; null: all at once", ge=1)
    prompt_key: str = key("prompt", "column of the prompt: chat messages or text")
    prompt_format: Literal["auto", "chat", "text"] = key("auto", "prompts are chat messages or plain text; auto: look")
    reward_fn_key: str = key("data_source", "column that chooses the reward function")
    max_prompt_length: int = key(512, "longest prompt in tokens", ge=1)
    max_response_length: int = key(512, "longest answer in tokens", ge=1)
    filter_overlong_prompts: bool = key(False, "drop (and count) prompts that are too long")
    truncation: Literal["error", "left", "right", "middle"] = key("error", "what happens to a prompt that is too long")
    shuffle: bool = key(True, "shuffle the training rows in every epoch")
    seed: int = key(42, "seed of that order", follows="${trainer.seed}", ge=0)
    validation_shuffle: bool = key(False, "shuffle the validation rows")
    custom_cls: CustomClassConfig = part(CustomClassConfig, "dataset class instead of RLHFDataset")
    apply_chat_template_kwargs: dict[str, Any] = key({}, "arguments of the chat template, such as enable_thinking")


class CustomRewardFunctionConfig(Node):
    """`reward.custom_reward_function`: a function of the user's, by address."""

    path: FilePath | None = key(None, "Python file or module with the reward function")
    name: str = key("compute_score", "name of the function in it")
    reward_kwargs: dict[str, Any] = key({}, "further arguments of the function")


class ManagerModuleConfig(Node):
    """Where a reward manager of the user's is."""

    path: FilePath | None = key(None, "Python file or module with the manager class (source: importlib)")
    name: str | None = key(None, "a label for it")


class RewardManagerConfig(Node):
    """`reward.reward_manager`: what turns rows into scores."""

    source: Literal["register", "importlib"] = key("register", "find the manager by its registered name, or in a file")
    name: str = key("naive", "registered name of the manager, or the class in module.path")
    module: ManagerModuleConfig = part(ManagerModuleConfig, "where the class is")


class RewardModelConfig(Node):
    """`reward.reward_model`: a model that scores answers."""

    enable: bool = key(False, "score by a model")
    model_path: FilePath | None = key(None, "HuggingFace sequence-classification model: a directory or an id")
    tokenizer_path: FilePath | None = key(None, "directory of its tokenizer where that is not beside the model")
    custom_chat_template: str | None = key(None, "Jinja chat template instead of its tokenizer's own")
    trust_remote_code: bool = key(False, "run the Python code that comes with the model or its tokenizer")
    use_remove_padding: bool = key(True, "compute no padding: rows are packed one after another")
    micro_batch_size_per_gpu: int | None = key(None, "sequences per forward pass; null: by tokens", ge=1)
    use_dynamic_bsz: bool = key(False, "micro-batches by tokens")
    forward_max_token_len_per_gpu: int = key(32768, "tokens in a micro-batch of one rank", ge=1)
    fsdp: EngineConfig = part(EngineConfig, "precision, sharding and offloading")


class SandboxConfig(Node):
    """`reward.sandbox_fusion`: a service that runs generated code."""

    url: str | None = key(None, "address of the service")
    max_concurrent: int = key(64, "requests at the same time", ge=1)
    memory_limit_mb: int = key(1024, "memory of one run in MB", ge=1)


class RewardConfig(Node):
    """`reward`: how answers are scored."""

    custom_reward_function: CustomRewardFunctionConfig = part(CustomRewardFunctionConfig, "a function by address")
    reward_function: str | None = key(None, "registered reward function for all rows; null: data_source chooses")
    reward_manager: RewardManagerConfig = part(RewardManagerConfig, "what turns rows into scores")
    reward_kwargs: dict[str, Any] = key({}, "further arguments of the reward manager")
    reward_model: RewardModelConfig = part(RewardModelConfig, "a model that scores")
    sandbox_fusion: SandboxConfig = part(SandboxConfig, "a service that runs code")
    timeout: float | None = key(300.0, "seconds for one answer; null: no limit", gt=0)
    on_error: Literal["raise", "count"] = key("raise", "an answer that cannot be scored: stop, or count it")
    failure_score: float = key(0.0, "score of such an answer with on_error: count")
