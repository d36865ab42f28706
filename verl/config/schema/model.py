"""The `model`, `optim`, `fsdp_config` and `checkpoint` sections of one trained model."""

from typing import Any, Literal

from verl.config.fields import FilePath, Precision, Section, StrList, Template, field, is_positive, like
from verl.engines.traits import strategy_traits, strategy_with

CheckpointContents = list[Literal["model", "optimizer", "extra", "hf_model"]]

MODEL_PARALLEL = ("strategy", strategy_with("model_parallel"))
"""When a `megatron` section has an effect."""

SHARDED = ("strategy", strategy_with("model_parallel", False))
"""When an FSDP section has an effect."""

_COSINE, _WSD = ("lr_scheduler_type", "cosine"), ("lr_scheduler_type", "wsd")
_DECAYS = ("lr_scheduler_type", lambda name: name != "constant")
_WARMS_UP = (("lr_warmup_steps_ratio", is_positive), ("lr_warmup_steps", is_positive))


def is_model_parallel(strategy: str) -> bool:
    """Whether a training engine has the settings of a `megatron` section."""
    return bool(strategy_traits(strategy).model_parallel)


class ModelConfig(Section):
    """`actor_rollout_ref.model`: the model to train."""

    path: FilePath | None = field(None, "Hugging Face model: a folder or a Hub id")
    tokenizer_path: FilePath | None = field(None, "folder or Hub id of the tokenizer; null: that of the model")
    trust_remote_code: bool = field(False, "run the Python code that comes with a model or tokenizer")
    custom_chat_template: Template | None = field(
        None, "chat template that replaces the tokenizer's: Jinja, or a .jinja file"
    )
    override_config: dict[str, Any] = field({}, "values that override the model's config.json")
    enable_gradient_checkpointing: bool | Literal["auto"] = field(
        "auto", "recompute activations in the backward pass; auto: on a GPU, if memory requires it"
    )
    use_remove_padding: bool = field(True, "pack sequences instead of padding them")
    use_liger: bool = field(False, "use Liger kernels for norms, MLP and rotary embedding (GPU only)")
    lora_rank: int = field(0, "rank of the LoRA adapters; 0: train all weights", ge=0)
    lora_alpha: float = field(
        16,
        "LoRA scaling: adapters are multiplied by lora_alpha / lora_rank",
        active_when=("lora_rank", is_positive),
        ge=0,
    )
    target_modules: StrList = field(
        ["all-linear"],
        "modules that get LoRA adapters; all-linear: the linear layers except the output layer",
        active_when=("lora_rank", is_positive),
    )
    target_parameters: StrList | None = field(
        None,
        "fused expert tensors that get LoRA adapters, such as experts.down_proj; [all-experts]: all; null: none",
        active_when=("lora_rank", is_positive),
    )
    exclude_modules: StrList | None = field(
        None,
        "modules that do not get LoRA adapters; null: those outside the language model of a vision-language model",
        active_when=("lora_rank", is_positive),
    )
    freeze_vision_tower: bool = field(False, "do not train the vision tower of a vision-language model")
    lora_adapter_path: FilePath | None = field(None, "LoRA adapter to start from")
    quantization: Literal["nf4", "fp8"] | None = field(
        None,
        "nf4: frozen weights of linear layers under LoRA adapters in 4 bits (QLoRA; needs bitsandbytes); fp8: training "
        "and generation compute linear layers in FP8, all weights are trained",
    )

    @property
    def has_adapters(self) -> bool:
        """Whether LoRA adapters are trained, so that the weights that training started from are still there."""
        return self.lora_rank > 0 or self.lora_adapter_path is not None


class CriticModelConfig(ModelConfig):
    """`critic.model`: by default the model of the policy, with a value head."""

    path: FilePath | None = like(ModelConfig, "path", "${actor_rollout_ref.model.path}")
    tokenizer_path: FilePath | None = like(ModelConfig, "tokenizer_path", "${actor_rollout_ref.model.tokenizer_path}")
    trust_remote_code: bool = like(ModelConfig, "trust_remote_code", "${actor_rollout_ref.model.trust_remote_code}")


class OptimConfig(Section):
    """The optimizer, its learning-rate schedule, and gradient clipping."""

    optimizer: Literal["AdamW", "AdamW8bit"] = field("AdamW", "AdamW8bit: 8-bit moments, a quarter of their memory")
    lr: float = field(1e-6, "peak learning rate", ge=0)
    betas: tuple[float, float] = field((0.9, 0.999), "AdamW betas")
    weight_decay: float = field(0.01, "decoupled weight decay", ge=0)
    clip_grad: float = field(1.0, "maximum gradient norm of a mini-batch", gt=0)
    lr_scheduler_type: Literal["constant", "cosine", "linear", "wsd"] = field(
        "constant", "learning-rate schedule after warmup; wsd: constant, then a linear decay at the end"
    )
    lr_warmup_steps: int = field(-1, "linear warmup steps; -1: use lr_warmup_steps_ratio", ge=-1)
    lr_warmup_steps_ratio: float = field(
        0.0, "warmup as a fraction of all steps", active_when=("lr_warmup_steps", lambda steps: steps <= 0), ge=0, le=1
    )
    lr_warmup_init_ratio: float = field(
        0.0, "learning rate at the start of the warmup, as a fraction of lr", active_when=_WARMS_UP, ge=0, le=1
    )
    min_lr_ratio: float = field(
        0.0, "final learning rate of a decaying schedule, as a fraction of lr", active_when=_DECAYS, ge=0, le=1
    )
    lr_decay_steps_ratio: float = field(
        0.1, "decay of the wsd schedule as a fraction of all steps", active_when=_WSD, ge=0, le=1
    )
    num_cycles: float = field(0.5, "number of cosine cycles; 0.5 decays once", active_when=_COSINE, gt=0)
    total_training_steps: int = field(
        -1,
        "length of the schedule in steps; -1: that of the run",
        active_when=[
            (_DECAYS, ("lr_warmup_steps_ratio", is_positive)),
            (_DECAYS, ("lr_warmup_steps", lambda steps: steps <= 0)),
        ],
        ge=-1,
    )
    override_optimizer_config: dict[str, Any] | None = field(None, "extra arguments of the optimizer")


class CriticOptimConfig(OptimConfig):
    """`critic.optim`."""

    lr: float = field(1e-5, "peak learning rate", ge=0)


class EngineConfig(Section):
    """Precision, sharding and offloading of one model (`fsdp_config`; `critic.fsdp`)."""

    model_dtype: Precision = field("auto", "dtype of the stored weights; auto: fp32")
    dtype: Precision = field("auto", "dtype of the computation; auto: fp32 on a CPU, bf16 on a GPU")
    stochastic_rounding: bool = field(
        False,
        "round updated weights and optimizer state stochastically, so that bf16 weights lose no small updates",
        active_when=("model_dtype", lambda dtype: dtype in ("bf16", "bfloat16")),
    )
    param_offload: bool = field(False, "keep the weights in host memory between phases")
    optimizer_offload: bool = field(False, "keep the optimizer state in host memory between phases")
    offload_policy: bool = field(False, "FSDP2 CPU offloading: keep shards in host memory during the step")
    reshard_after_forward: bool = field(True, "free gathered weights after the forward pass")
    fsdp_size: int = field(-1, "ranks per shard group; -1: all", ge=-1)
    ulysses_sequence_parallel_size: int = field(1, "sequence-parallel size (Ulysses)", ge=1)
    tensor_parallel_size: int = field(1, "tensor-parallel size, for models with a plan in transformers", ge=1)
    expert_parallel_size: int = field(1, "ranks that share the experts of a layer, for mixtures of experts", ge=1)

    @property
    def ranks_with_same_rows(self) -> int:
        """The model-parallel size: how many ranks compute the same rows. World size / this = data-parallel size."""
        return self.ulysses_sequence_parallel_size * self.tensor_parallel_size


class CheckpointConfig(Section):
    """Contents of the checkpoint of one model."""

    save_contents: CheckpointContents = field(
        ["model", "optimizer", "extra"], "what to save: model, optimizer, extra (schedule, RNG state), hf_model"
    )
    load_contents: CheckpointContents = field(["model", "optimizer", "extra"], "what to restore")
    async_save: bool = field(False, "write checkpoints in the background")


class ActorCheckpointConfig(CheckpointConfig):
    """`actor_rollout_ref.actor.checkpoint`."""

    load_contents: CheckpointContents = like(
        CheckpointConfig, "load_contents", "${actor_rollout_ref.actor.checkpoint.save_contents}"
    )


class CriticCheckpointConfig(CheckpointConfig):
    """`critic.checkpoint`."""

    load_contents: CheckpointContents = like(CheckpointConfig, "load_contents", "${critic.checkpoint.save_contents}")
