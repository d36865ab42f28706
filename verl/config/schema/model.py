"""The configuration of one trained model: weights, optimizer, precision and sharding, checkpoints."""

from typing import Any, Literal

from verl.config.fields import FilePath, Node, Texts, key

Precision = Literal["auto", "fp64", "float64", "fp32", "float32", "bf16", "bfloat16", "fp16", "float16"]
Strategy = Literal["fsdp", "fsdp2", "megatron"]


class ModelConfig(Node):
    """`actor_rollout_ref.model`: which model is trained, and how it is built."""

    path: FilePath | None = key(None, "HuggingFace model: a directory or the id of a repository")
    tokenizer_path: FilePath | None = key(None, "directory of the tokenizer where it is not beside the model")
    trust_remote_code: bool = key(False, "run the Python code that comes with a model or tokenizer")
    custom_chat_template: str | None = key(None, "Jinja chat template instead of the tokenizer's own")
    override_config: dict[str, Any] = key({}, "values put over those of the model's config.json")
    enable_gradient_checkpointing: bool | Literal["auto"] = key(
        "auto", "compute activations again in the backward pass, keep none; auto: on a GPU whose memory asks for it"
    )
    use_remove_padding: bool = key(True, "compute no padding: rows are packed one after another")
    use_liger: bool = key(False, "Liger's kernels for norms, MLP and rotary embedding instead of ours, on a GPU")
    lora_rank: int = key(0, "rank of the LoRA adapters; 0 trains all weights", ge=0)
    lora_alpha: float = key(16, "LoRA scaling: the adapter counts lora_alpha / lora_rank", gt=0)
    target_modules: Texts = key(["all-linear"], "modules that receive LoRA adapters")
    exclude_modules: Texts | None = key(None, "modules kept out of LoRA")
    lora_adapter_path: FilePath | None = key(None, "start from this LoRA adapter")


class CriticModelConfig(ModelConfig):
    """`critic.model`: by default the same model as the policy, with a value head."""

    path: FilePath | None = key(
        None, "HuggingFace model that the critic starts from", follows="${actor_rollout_ref.model.path}"
    )
    tokenizer_path: FilePath | None = key(
        None, "directory of the critic's tokenizer", follows="${actor_rollout_ref.model.tokenizer_path}"
    )
    trust_remote_code: bool = key(
        False, "run Python code that comes with the model", follows="${actor_rollout_ref.model.trust_remote_code}"
    )


class OptimConfig(Node):
    """AdamW, its learning-rate schedule and the clipping of the gradient."""

    lr: float = key(1e-6, "peak learning rate", ge=0)
    betas: tuple[float, float] = key((0.9, 0.999), "Adam's decay of the two moments")
    weight_decay: float = key(0.01, "decoupled weight decay", ge=0)
    clip_grad: float = key(1.0, "largest norm of the gradient of a mini-batch; larger ones are scaled down", gt=0)
    lr_scheduler_type: Literal["constant", "cosine"] = key("constant", "learning rate after the warm-up")
    lr_warmup_steps: int = key(-1, "steps of linear warm-up; -1: lr_warmup_steps_ratio decides", ge=-1)
    lr_warmup_steps_ratio: float = key(0.0, "warm-up as a share of all steps", ge=0, le=1)
    min_lr_ratio: float = key(0.0, "where the cosine schedule ends, as a share of lr", ge=0, le=1)
    num_cycles: float = key(0.5, "cosine cycles; 0.5 goes down once", gt=0)
    total_training_steps: int = key(-1, "length of the schedule in steps; -1: that of the run", ge=-1)
    override_optimizer_config: dict[str, Any] | None = key(None, "further arguments of the optimizer")


class CriticOptimConfig(OptimConfig):
    """`critic.optim`."""

    lr: float = key(1e-5, "peak learning rate", ge=0)


class EngineConfig(Node):
    """Precision, sharding and offloading of one model (`fsdp_config`; `critic.fsdp`)."""

    model_dtype: Precision = key("auto", "dtype of the stored weights; auto: fp32")
    dtype: Precision = key("auto", "dtype of the computation; auto: fp32 on a CPU, bf16 on a GPU")
    use_torch_compile: bool = key(
        False, "compile every layer, on a GPU: the first updates take long, the others a little less"
    )
    param_offload: bool = key(False, "keep the weights in host memory between phases")
    optimizer_offload: bool = key(False, "keep the optimizer state in host memory between phases")
    offload_policy: bool = key(False, "let FSDP2 keep shards in host memory during the step")
    reshard_after_forward: bool = key(True, "free gathered weights after the forward pass")
    fsdp_size: int = key(-1, "ranks of a shard group; -1: all", ge=-1)
    ulysses_sequence_parallel_size: int = key(1, "ranks that share one sequence", ge=1)
    tensor_parallel_size: int = key(1, "ranks that share one layer, for models with a plan in transformers", ge=1)

    @property
    def ranks_with_same_rows(self) -> int:
        """How many ranks work on the same rows: the data-parallel size is the number of ranks divided by this."""
        return self.ulysses_sequence_parallel_size * self.tensor_parallel_size


class CheckpointConfig(Node):
    """What a checkpoint of one model holds."""

    save_contents: list[Literal["model", "optimizer", "extra", "hf_model"]] = key(
        ["model", "optimizer", "extra"], "parts to write: model, optimizer, extra (schedule, random state), hf_model"
    )
    load_contents: list[Literal["model", "optimizer", "extra", "hf_model"]] = key(
        ["model", "optimizer", "extra"], "parts to restore"
    )
    async_save: bool = key(False, "write in the background")


class ActorCheckpointConfig(CheckpointConfig):
    """`actor_rollout_ref.actor.checkpoint`."""

    load_contents: list[Literal["model", "optimizer", "extra", "hf_model"]] = key(
        ["model", "optimizer", "extra"],
        "parts to restore",
        follows="${actor_rollout_ref.actor.checkpoint.save_contents}",
    )


class CriticCheckpointConfig(CheckpointConfig):
    """`critic.checkpoint`."""

    load_contents: list[Literal["model", "optimizer", "extra", "hf_model"]] = key(
        ["model", "optimizer", "extra"], "parts to restore", follows="${critic.checkpoint.save_contents}"
    )
