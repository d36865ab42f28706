"""The configuration of sampling: the engine that generates answers, in training and at validation."""

from typing import Any, Literal

from verl.config.fields import Node, Texts, key, part
from verl.config.schema.model import Precision

_ACTOR = "${actor_rollout_ref.actor."


class EngineKwargs(Node):
    """Arguments handed on to an engine as they are."""

    vllm: dict[str, Any] = key({}, "arguments of vLLM")
    sglang: dict[str, Any] = key({}, "arguments of SGLang")
    trtllm: dict[str, Any] = key({}, "arguments of TensorRT-LLM")


class SamplingConfig(Node):
    """What every use of a generation engine has: which one, how it samples, how much it may use."""

    name: Literal["hf", "native", "vllm", "sglang", "trtllm"] = key(
        "native", "generation engine; native: our own, on the training weights; hf: generate() of transformers"
    )
    temperature: float = key(1.0, "sampling temperature", ge=0)
    top_k: int = key(-1, "sample among the k likeliest tokens; -1: all", ge=-1)
    top_p: float = key(1.0, "sample among the likeliest tokens that hold this mass", gt=0, le=1)
    min_p: float = key(0.0, "sample among tokens of at least this share of the likeliest one's probability", ge=0, le=1)
    prompt_length: int = key(512, "longest prompt in tokens", ge=1)
    response_length: int = key(512, "longest answer in tokens", ge=1)
    stop: Texts = key([], "texts that end an answer; the token that completes one is its last")
    ignore_eos: bool = key(False, "go on after the end-of-sequence token")
    dtype: Precision = key("auto", "dtype of the engine's weights; auto: that of the training computation")
    tensor_model_parallel_size: int = key(1, "GPUs that hold one copy of the engine's weights", ge=1)
    gpu_memory_utilization: float = key(0.5, "share of the GPU's memory for the engine", gt=0, le=1)
    enforce_eager: bool = key(False, "no CUDA graphs")
    free_cache_engine: bool = key(True, "give the engine's memory back during the update")
    max_num_seqs: int = key(1024, "rows generated at the same time", ge=1)
    max_num_batched_tokens: int = key(8192, "tokens in one pass of the engine", ge=1)
    max_model_len: int | None = key(None, "longest prompt and answer together; null: what the lengths need", ge=1)
    enable_chunked_prefill: bool = key(True, "read long prompts in pieces")
    enable_prefix_caching: bool = key(True, "keep the keys and values of shared prefixes")
    engine_kwargs: EngineKwargs = part(EngineKwargs, "arguments handed on to the engine")


class ValSamplingConfig(Node):
    """`actor_rollout_ref.rollout.val_kwargs`: sampling at validation."""

    do_sample: bool = key(False, "sample; false: take the likeliest token")
    temperature: float = key(0.0, "sampling temperature", ge=0)
    top_k: int = key(-1, "sample among the k likeliest tokens; -1: all", ge=-1)
    top_p: float = key(1.0, "sample among the likeliest tokens that hold this mass", gt=0, le=1)
    n: int = key(1, "answers per question", ge=1)


class RolloutConfig(SamplingConfig):
    """`actor_rollout_ref.rollout`: the answers that the policy is trained on."""

    n: int = key(1, "answers per prompt: the size of a group", ge=1)
    seed: int = key(42, "seed of sampling", follows="${trainer.seed}", ge=0)
    deterministic: bool = key(False, "log-probs of sampling bit-equal to those of training, at the cost of speed")
    prompt_length: int = key(512, "longest prompt in tokens", follows="${data.max_prompt_length}", ge=1)
    response_length: int = key(512, "longest answer in tokens", follows="${data.max_response_length}", ge=1)
    log_prob_micro_batch_size_per_gpu: int | None = key(
        None,
        "sequences per forward pass when old log-probs are computed",
        follows=_ACTOR + "ppo_micro_batch_size_per_gpu}",
        ge=1,
    )
    log_prob_use_dynamic_bsz: bool = key(False, "micro-batches by tokens", follows=_ACTOR + "use_dynamic_bsz}")
    log_prob_max_token_len_per_gpu: int | None = key(
        None, "tokens in a micro-batch of one rank", follows=_ACTOR + "ppo_max_token_len_per_gpu}", ge=1
    )
    val_kwargs: ValSamplingConfig = part(ValSamplingConfig, "sampling at validation")
