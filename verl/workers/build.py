"""From the sections of the configuration to the plain values that engines and rollouts take."""

import dataclasses
import importlib.util
import logging
from pathlib import Path
from typing import Any

import torch

from verl.config import schema
from verl.engines.base import MicroBatching, OptimizerConfig
from verl.engines.loading import ModelConfig, TokenModel, empty_module
from verl.engines.lora import LoraConfig
from verl.engines.offload import OffloadConfig
from verl.engines.sharding import FSDPEngine, ShardingConfig
from verl.engines.torch_engine import HFEngine
from verl.modeling.batch_invariant.model import Forward, use_invariant
from verl.modeling.layers import Kernels
from verl.protocol import DataProto
from verl.rollout.base import RolloutEngine, SamplingParams
from verl.rollout.hf import HFRollout
from verl.rollout.native.engine import NativeRollout
from verl.rollout.replica import ReplicaRollout
from verl.rollout.stop_strings import StopStrings
from verl.utils.device import resolve_device, resolve_dtype
from verl.utils.rng import fork_seed

logger = logging.getLogger("verl.workers")


def model_config(
    model: schema.ModelConfig,
    engine: schema.EngineConfig,
    device: str,
    local_rank: int,
    kind: str = "causal_lm",
    deterministic: bool = False,
) -> ModelConfig:
    """A model section and an engine section as an engine reads them. deterministic: `rollout.deterministic`."""
    on = resolve_device(device, local_rank)
    compute_dtype, lora = resolve_dtype(engine.dtype, on), lora_config(model)
    # what is trained stays float32 where nothing else is asked for: bf16 weights lose updates smaller than 2**-8 of
    # them; the weights under adapters are not trained
    model_dtype = torch.float32 if lora is None else compute_dtype
    return ModelConfig(
        path=model.path,
        kind=kind,
        device=on,
        model_dtype=model_dtype if engine.model_dtype == "auto" else resolve_dtype(engine.model_dtype, on),
        compute_dtype=compute_dtype,
        gradient_checkpointing=model.enable_gradient_checkpointing,
        use_remove_padding=model.use_remove_padding,
        trust_remote_code=model.trust_remote_code,
        override_config=tuple(model.override_config.items()),
        lora=lora,
        kernels="invariant" if deterministic else kernels_for(model, engine, on, compute_dtype),
    )


def kernels_for(
    model: schema.ModelConfig, engine: schema.EngineConfig, device: torch.device, dtype: torch.dtype
) -> Kernels:
    """How the layers are computed: by our own functions unless others are asked for.

    Raises what `check_kernels` does.
    """
    check_kernels(model, device)
    if device.type != "cuda":
        if engine.use_torch_compile:
            logger.info("use_torch_compile changes nothing on a %s: layers are compiled on a GPU alone", device.type)
        return "fused" if dtype in (torch.float32, torch.float64) else "plain"  # a CPU's functions know no autocast
    if model.use_liger:
        return "liger"
    if engine.use_torch_compile:
        return "compiled"
    return "plain" if dtype == torch.float64 else "fused"  # our kernels compute in float32


def check_kernels(model: schema.ModelConfig, device: torch.device) -> None:
    """Raise ValueError for Liger on a CPU, or without its package."""
    if not model.use_liger:
        return
    if device.type != "cuda":
        raise ValueError(f"model.use_liger: Liger's kernels run on a GPU, and this is a {device.type}: use false")
    if importlib.util.find_spec("liger_kernel") is None:
        raise ValueError("model.use_liger: the package liger-kernel is not installed: pip install it, or use false")


def lora_config(model: schema.ModelConfig) -> LoraConfig | None:
    """The adapters that a model section asks for, None when all weights are trained."""
    if not has_adapters(model):
        return None
    return LoraConfig(
        rank=model.lora_rank,
        alpha=model.lora_alpha,
        target_modules=tuple(model.target_modules),
        exclude_modules=tuple(model.exclude_modules or ()),
        adapter_path=model.lora_adapter_path,
    )


def has_adapters(model: schema.ModelConfig) -> bool:
    """Whether adapters are trained, so that the model that training started from is still there."""
    return model.lora_rank > 0 or model.lora_adapter_path is not None


def load_tokenizer(model: schema.ModelConfig) -> Any:
    """The tokenizer beside the model, or of model.tokenizer_path. Raises ValueError when there is none."""
    from transformers import AutoTokenizer

    path = model.tokenizer_path or model.path
    if not Path(path).is_dir():
        _check_hub(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError) as error:
        where = f"in {path!r}" if Path(path).is_dir() else f"there is no folder {path!r}, and as a name of the hub"
        raise ValueError(f"no tokenizer: {where}: {error}") from error
    if model.custom_chat_template is not None:
        tokenizer.chat_template = model.custom_chat_template
    return tokenizer


def optimizer_config(optim: schema.OptimConfig, total_training_steps: int) -> OptimizerConfig:
    """An `optim` section. total_training_steps: the run's, where the section leaves its own open."""
    total = optim.total_training_steps if optim.total_training_steps > 0 else total_training_steps
    warmup = optim.lr_warmup_steps if optim.lr_warmup_steps > 0 else int(optim.lr_warmup_steps_ratio * total)
    return OptimizerConfig(
        lr=optim.lr,
        weight_decay=optim.weight_decay,
        betas=tuple(optim.betas),
        clip_grad=optim.clip_grad,
        lr_scheduler_type=optim.lr_scheduler_type,
        lr_warmup_steps=max(0, warmup),
        total_training_steps=total,
        min_lr_ratio=optim.min_lr_ratio,
        num_cycles=optim.num_cycles,
        further=tuple((optim.override_optimizer_config or {}).items()),
    )


def make_engine(
    config: ModelConfig,
    engine: schema.EngineConfig,
    optimizer: OptimizerConfig | None,
    world_size: int,
    timeout: float | None = None,
) -> HFEngine:
    """One process holds the model whole, several share it. timeout: of a collective, in seconds.

    Raises ValueError for a setting that needs several processes where there is one.
    """
    offload = OffloadConfig(engine.param_offload, engine.optimizer_offload)
    if world_size > 1:
        sharding = ShardingConfig(
            fsdp_size=engine.fsdp_size,
            reshard_after_forward=engine.reshard_after_forward,
            offload=engine.offload_policy,
            sequence_parallel=engine.ulysses_sequence_parallel_size,
            tensor_parallel=engine.tensor_parallel_size,
            timeout=timeout,
        )
        return FSDPEngine(config, optimizer, sharding, offload)
    if engine.offload_policy:
        raise ValueError("offload_policy is FSDP's, which needs several processes: with one, use param_offload")
    for key in ("ulysses_sequence_parallel_size", "tensor_parallel_size"):
        size = engine.model_dump()[key]
        if size > 1:
            raise ValueError(f"{key} is {size}, but there is one process: use 1")
    return HFEngine(config, optimizer, offload=offload)


def make_rollout(engine: HFEngine, config: schema.RolloutConfig, pad_token_id: int) -> RolloutEngine:
    """Generation on the engine's own module where that holds the weights as they are, else on a replica of them.

    They are not in the module where they are sharded, and where adapters lie beside them that must be merged first;
    transformers' `generate` computes with adapters as they are.
    """
    if engine.whole and (engine.config.lora is None or config.name == "hf"):
        exact = Forward(engine.model) if config.deterministic else None
        return rollout_on(engine.module, engine.config.compute_dtype, config, pad_token_id, exact)
    narrow = dataclasses.replace(engine.config, model_dtype=engine.config.compute_dtype, lora=None)
    module = empty_module(narrow).to_empty(device=narrow.device).requires_grad_(False)
    module.tie_weights()  # each got memory of its own
    for name, buffer in engine.module.named_buffers():
        module.get_buffer(name).copy_(buffer)
    exact = None
    if config.deterministic:  # the training computation, whose layers are gathered in the narrow dtype too
        use_invariant(module)
        exact = Forward(TokenModel(module, engine.config))
    return ReplicaRollout(rollout_on(module, narrow.compute_dtype, config, pad_token_id, exact), module)


def rollout_on(
    module: torch.nn.Module,
    dtype: torch.dtype,
    config: schema.SamplingConfig,
    pad_token_id: int,
    exact: Forward | None = None,
) -> RolloutEngine:
    """The engine that `rollout.name` asks for. dtype: of the training computation. exact: its forward pass."""
    if config.name == "hf":
        return HFRollout(module, pad_token_id, max_rows=config.max_num_seqs, compute_dtype=dtype)
    if config.dtype != "auto":
        dtype = resolve_dtype(config.dtype, module.device)
    return NativeRollout(
        module,
        pad_token_id=pad_token_id,
        dtype=None if dtype == next(module.parameters()).dtype else dtype,
        max_rows=config.max_num_seqs,
        memory_share=config.gpu_memory_utilization,
        graphs=not config.enforce_eager,
        exact=exact,
    )


def stop_strings(rollout: schema.SamplingConfig, tokenizer: Any) -> StopStrings | None:
    """`rollout.stop` with the tokenizer that turns answers into text."""
    return StopStrings(tuple(rollout.stop), tokenizer.decode) if rollout.stop else None


def micro_batching(rows: int | None, dynamic: bool, tokens: int | None) -> MicroBatching:
    """By tokens when asked to, by rows when a count is given, and by tokens otherwise: as many as fit when None."""
    return MicroBatching(rows=rows) if rows is not None and not dynamic else MicroBatching(tokens=tokens or "auto")


def sampling_params(
    rollout: schema.RolloutConfig | schema.GenerationRolloutConfig,
    response_length: int,
    stop_token_ids: tuple[int, ...],
    stop: StopStrings | None = None,
) -> SamplingParams:
    """A section on sampling as a rollout engine reads it."""
    return SamplingParams(
        max_tokens=response_length,
        stop_token_ids=stop_token_ids,
        temperature=rollout.temperature,
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        min_p=rollout.min_p,
        seed=rollout.seed,
        ignore_eos=rollout.ignore_eos,
        stop=stop,
    )


def sampling_in_mode(params: SamplingParams, mode: str, val: schema.ValSamplingConfig) -> SamplingParams:
    """mode: "train", "greedy" (the same limits, no randomness) or "validate" (as rollout.val_kwargs says)."""
    changes: dict[str, Any] = {
        "train": {},
        "greedy": {"temperature": 0.0, "top_k": -1, "top_p": 1.0, "min_p": 0.0},
        "validate": {
            "temperature": val.temperature if val.do_sample else 0.0,
            "top_k": val.top_k,
            "top_p": val.top_p,
            "min_p": 0.0,
        },
    }[mode]
    return dataclasses.replace(params, **changes)


def sample_ids(batch: DataProto) -> list[int]:
    """What the random numbers of each row are drawn by: its prompt and which sample of it, and nothing else."""
    rows = zip(batch.non_tensor_batch["uid"], batch.non_tensor_batch["sample_index"])
    return [fork_seed(str(uid), int(index)) for uid, index in rows]


def _check_hub(name: str) -> None:
    """A name that is no folder is one of the hub, or in the cache. Without this question, minutes pass in retries."""
    from huggingface_hub import HfApi, constants, try_to_load_from_cache

    if constants.HF_HUB_OFFLINE or isinstance(try_to_load_from_cache(name, "config.json"), str):
        return
    logger.info("there is no folder %r: asking %s", name, constants.ENDPOINT)
    try:
        HfApi().model_info(name, timeout=10)
    except Exception as error:
        raise ValueError(
            f"there is no folder {name!r}, and no model of that name was found at {constants.ENDPOINT}: "
            f"{type(error).__name__}: {error}"
        ) from error
