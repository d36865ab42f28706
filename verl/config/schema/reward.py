"""The `reward` section: how responses are scored."""

from typing import Any, Literal

from verl.config.fields import FilePath, Section, Template, field, section
from verl.config.schema.model import EngineConfig


class CustomRewardFunctionConfig(Section):
    """`reward.custom_reward_function`: a custom reward function, by file and name."""

    path: FilePath | None = field(None, "Python file or module with the reward function")
    name: str = field("compute_score", "name of the function")
    reward_kwargs: dict[str, Any] = field({}, "extra arguments of the function")


class ManagerModuleConfig(Section):
    """The file of a custom reward manager."""

    path: FilePath | None = field(None, "Python file or module with the manager class (source: importlib)")
    name: str | None = field(None, "a label for the module")


class RewardManagerConfig(Section):
    """`reward.reward_manager`: what computes the scores of a batch."""

    source: Literal["register", "importlib"] = field("register", "find the manager by registered name, or in a file")
    name: str = field("naive", "registered name of the manager, or the class in module.path")
    module: ManagerModuleConfig = section(ManagerModuleConfig, "file of the class")


class RewardModelConfig(Section):
    """`reward.reward_model`: a model that scores responses."""

    enable: bool = field(False, "score with a reward model")
    model_path: FilePath | None = field(None, "Hugging Face sequence-classification model: a folder or a Hub id")
    tokenizer_path: FilePath | None = field(None, "folder or Hub id of its tokenizer; null: that of the model")
    custom_chat_template: Template | None = field(
        None, "chat template that replaces its tokenizer's: Jinja, or a .jinja file"
    )
    trust_remote_code: bool = field(False, "run the Python code that comes with the model or its tokenizer")
    use_remove_padding: bool = field(True, "pack sequences instead of padding them")
    micro_batch_size_per_gpu: int | None = field(
        None, "sequences per forward pass; null: by tokens", active_when=("use_dynamic_bsz", False), ge=1
    )
    use_dynamic_bsz: bool = field(False, "size micro-batches by tokens instead of sequences")
    forward_max_token_len_per_gpu: int = field(
        32768,
        "tokens per micro-batch of one rank",
        active_when=(("micro_batch_size_per_gpu", None), ("use_dynamic_bsz", True)),
        ge=1,
    )
    fsdp: EngineConfig = section(EngineConfig, "precision, sharding and offloading")


REWARD_FUNCTION = "registered reward function for all samples; null: by data_source"


class RewardConfig(Section):
    """`reward`: how responses are scored."""

    custom_reward_function: CustomRewardFunctionConfig = section(CustomRewardFunctionConfig, "custom reward function")
    reward_function: str | None = field(None, REWARD_FUNCTION)
    reward_manager: RewardManagerConfig = section(RewardManagerConfig, "what computes the scores of a batch")
    reward_kwargs: dict[str, Any] = field({}, "extra arguments of the reward manager")
    reward_model: RewardModelConfig = section(
        RewardModelConfig, "a model that scores responses", active_when=("reward_model.enable", True)
    )
    timeout: float | None = field(300.0, "seconds to score one response; null: no limit", gt=0)
    isolation: Literal["process", "none"] = field(
        "process", "where custom reward functions run. process: a worker process that can be killed; none: the trainer"
    )
    memory_limit_mb: int | None = field(
        None, "memory limit of the reward worker process in MiB; null: half of the memory of the host", ge=1
    )
    on_error: Literal["raise", "count"] = field(
        "raise",
        "when a response cannot be scored: stop the run, or count it and use failure_score",
    )
    failure_score: float = field(
        0.0, "score of a response that cannot be scored, with on_error=count", active_when=("on_error", "count")
    )
    max_failure_rate: float = field(
        0.1,
        "with on_error=count, stop if more than one response and this share of a step cannot be scored",
        active_when=("on_error", "count"),
        ge=0,
        le=1,
    )
    retries: int = field(
        0,
        "how often responses that could not be scored are scored again, after 1, 2, 4 ... s",
        ge=0,
    )
