"""The configurations of `verl sft`, `verl dpo` and `verl rm`: `load_config(..., schema=SFTConfig)`."""

from typing import Any, ClassVar, Literal

from verl.config.fields import FilePath, FilePaths, Precision, Section, StrList, field, like, section
from verl.config.naming import RunSchema
from verl.config.public.aliases import SFT
from verl.config.schema.data import BAD_ROWS, NUM_WORKERS, DatasetClassConfig, MediaSection, PromptFormat
from verl.config.schema.megatron import MegatronConfig
from verl.config.schema.model import (
    MODEL_PARALLEL,
    SHARDED,
    CheckpointConfig,
    CheckpointContents,
    EngineConfig,
    ModelConfig,
    OptimConfig,
    is_model_parallel,
)
from verl.config.schema.trainer import RayConfig, RunConfig


class SFTDataConfig(MediaSection):
    """`data`: chats, or prompts with responses. A dataset class receives this section."""

    train_files: FilePaths = field([], "training data: .parquet, .jsonl, .json, .csv, or hub names")
    val_files: FilePaths = field([], "validation data")
    train_max_samples: int = field(-1, "number of training rows to use; -1: all", ge=-1)
    val_max_samples: int = field(-1, "number of validation rows to use; -1: all", ge=-1)
    train_batch_size: int = field(256, "samples per optimizer update, over all ranks", ge=1)
    micro_batch_size_per_gpu: int | None = field(
        4, "samples per forward and backward pass without use_dynamic_bsz", active_when=("use_dynamic_bsz", False), ge=1
    )
    use_dynamic_bsz: bool = field(True, "size micro-batches by tokens instead of samples")
    max_token_len_per_gpu: int = field(
        8192,
        "tokens per micro-batch of one rank with use_dynamic_bsz",
        active_when=(("micro_batch_size_per_gpu", None), ("use_dynamic_bsz", True)),
        ge=1,
    )
    messages_key: str | None = field(None, "column of chat messages; null: detect")
    prompt_key: str | None = field(None, "column of the prompt, if there are no messages; null: detect")
    response_key: str | None = field(None, "column of the response; null: detect")
    prompt_dict_keys: StrList | None = field(None, "keys that lead to the prompt inside a column of mappings")
    response_dict_keys: StrList | None = field(None, "keys that lead to the response inside a column of mappings")
    prompt_format: PromptFormat = field("auto", "chat messages or plain text; auto: detect")
    max_length: int = field(1024, "maximum length of prompt and response in tokens", ge=2)
    truncation: Literal["error", "left", "right"] = field("error", "how to truncate overlong samples")
    max_bad_rows: int = field(0, BAD_ROWS, ge=0)
    shuffle: bool = field(True, "shuffle the training rows in every epoch")
    seed: int = field(1, "shuffle seed", default_from="${trainer.seed}", ge=0, le=2**62)
    dataloader_num_workers: int | None = field(None, NUM_WORKERS, ge=0)
    custom_cls: DatasetClassConfig = section(DatasetClassConfig, "custom dataset class that replaces SFTDataset")
    apply_chat_template_kwargs: dict[str, Any] = field({}, "arguments of the chat template")
    tool_config_path: FilePath | None = field(None, "YAML file with the tools that chats describe")
    function_tool_path: FilePath | None = field(None, "Python file with the function tools that chats describe")


class SFTOptimConfig(OptimConfig):
    """`optim`."""

    lr: float = field(1e-5, "peak learning rate", ge=0)


#: keys of `engine` that `engine.megatron` inherits
_INHERITED = ("dtype", "param_offload", "optimizer_offload")


class SFTMegatronConfig(MegatronConfig):
    """`engine.megatron`."""

    param_offload: bool = like(MegatronConfig, "param_offload", "${engine.param_offload}")
    optimizer_offload: bool = like(MegatronConfig, "optimizer_offload", "${engine.optimizer_offload}")
    dtype: Precision = like(MegatronConfig, "dtype", "${engine.dtype}")


class SFTEngineConfig(EngineConfig):
    """`engine`: precision, sharding and offloading."""

    strategy: str = field("fsdp", "registered name of the training engine: fsdp, fsdp2, megatron, or a custom one")
    megatron: SFTMegatronConfig = section(
        SFTMegatronConfig, "precision and parallelism of strategy=megatron", active_when=MODEL_PARALLEL
    )

    @property
    def selected(self) -> EngineConfig | MegatronConfig:
        """The section of the training engine."""
        return self.megatron if is_model_parallel(self.strategy) else self


class SFTCheckpointConfig(CheckpointConfig):
    """`checkpoint`."""

    load_contents: CheckpointContents = like(CheckpointConfig, "load_contents", "${checkpoint.save_contents}")


class SFTTrainerConfig(RunConfig):
    """`trainer`: the SFT run."""

    total_epochs: int = field(4, "training epochs", ge=1)
    seed: int = field(1, "seed of all random number generators", ge=0, le=2**62)
    max_ckpt_to_keep: int | None = field(None, "number of checkpoints to keep; null: all", ge=1)


class SFTConfig(RunSchema):
    """The root of an SFT configuration."""

    aliases: ClassVar = SFT
    upstream: ClassVar = "sft"

    data: SFTDataConfig = section(SFTDataConfig, "samples")
    model: ModelConfig = section(ModelConfig, "the model")
    optim: SFTOptimConfig = section(SFTOptimConfig, "optimizer")
    engine: SFTEngineConfig = section(
        SFTEngineConfig,
        "precision, sharding and offloading",
        below={name: ("engine.strategy", SHARDED[1]) for name in EngineConfig.model_fields if name not in _INHERITED},
    )
    checkpoint: SFTCheckpointConfig = section(SFTCheckpointConfig, "contents of a checkpoint")
    trainer: SFTTrainerConfig = section(SFTTrainerConfig, "the run")
    imports: StrList = field([], "Python files or modules that every process imports first (custom code)")
    ray_kwargs: RayConfig = section(RayConfig, "how Ray is started", active_when=("trainer.backend", "ray"))


# ---- preferences ----------------------------------------------------------------------------------------------------


class PreferenceDataConfig(SFTDataConfig):
    """`data`: preference pairs, or responses with a label."""

    chosen_key: str = field("chosen", "column of the preferred responses")
    rejected_key: str = field("rejected", "column of the other responses")
    label_key: str = field("label", "column that tells whether a response is good (true or 1), if there are no pairs")
    margin_key: str = field("margin", "optional column of how much better the chosen response is (reward models)")


class PreferenceLossConfig(Section):
    """`dpo`: the loss. null: the default of the loss."""

    loss: str = field("dpo", "dpo, ipo, kto, simpo, orpo, or the name of a custom loss (register_preference_loss)")
    beta: float | None = field(None, "strength of the KL constraint; scale of the rewards (simpo); lambda (orpo)", gt=0)
    label_smoothing: float | None = field(None, "dpo: share of preferences assumed to be wrong", ge=0, lt=0.5)
    gamma: float | None = field(None, "simpo: target margin of the rewards", ge=0)
    desirable_weight: float | None = field(None, "kto: weight of good responses", gt=0)
    undesirable_weight: float | None = field(None, "kto: weight of bad responses", gt=0)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the loss that are set."""
        return self.model_dump(exclude={"loss"}, exclude_none=True)


class DPOOptimConfig(OptimConfig):
    """`optim`."""

    lr: float = field(1e-6, "peak learning rate", ge=0)


class DPOConfig(SFTConfig):
    """The root of a configuration of offline preference optimization."""

    optim: DPOOptimConfig = section(DPOOptimConfig, "optimizer")
    data: PreferenceDataConfig = section(PreferenceDataConfig, "preferences")
    dpo: PreferenceLossConfig = section(PreferenceLossConfig, "the loss")


class RewardLossConfig(Section):
    """`rm`: the Bradley-Terry loss."""

    center_coef: float = field(0.0, "weight of (score of chosen + score of rejected)^2: centers scores", ge=0)


class RMConfig(SFTConfig):
    """The root of a configuration that trains a reward model."""

    data: PreferenceDataConfig = section(PreferenceDataConfig, "preferences")
    rm: RewardLossConfig = section(RewardLossConfig, "the loss")
