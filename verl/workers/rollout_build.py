"""From the sections of the configuration to rollout engines and their sampling parameters."""

import dataclasses
from typing import Any

import torch

from verl.config import schema
from verl.engines.loading import TokenModel, empty_module
from verl.engines.torch_engine import TorchEngine
from verl.modeling.batch_invariant.model import BatchInvariantForward, use_batch_invariant
from verl.protocol import DataProto
from verl.rollout.base import RolloutEngine, SamplingParams
from verl.rollout.hf import HFRollout
from verl.rollout.native.engine import NativeRollout
from verl.rollout.replica import ReplicaRollout
from verl.rollout.stop_strings import StopStrings
from verl.utils.device import resolve_dtype
from verl.utils.rng import fork_seed


def make_rollout(engine: TorchEngine, config: schema.RolloutConfig, pad_token_id: int) -> RolloutEngine:
    """Generation on the engine's own module if that holds the full weights, otherwise on a replica of them.

    The weights are not in the module if they are sharded, or if adapters beside them must be merged first.
    """
    spec, shared = engine.model_spec, engine.shared_module()
    if shared is not None:
        return rollout_on(shared, spec.compute_dtype, config, pad_token_id, engine.model_forward())
    merged = spec.section.model_copy(update={"lora_rank": 0, "lora_adapter_path": None})
    narrow = dataclasses.replace(spec, section=merged, model_dtype=spec.compute_dtype)
    module = empty_module(narrow).to_empty(device=narrow.device).requires_grad_(False)
    module.tie_weights()  # to_empty gave tied parameters separate memory
    for name, buffer in engine.module.named_buffers():
        module.get_buffer(name).copy_(buffer)
    exact = None
    if config.deterministic:  # the training computation, whose layers are gathered in the narrow dtype too
        use_batch_invariant(module)
        exact = BatchInvariantForward(TokenModel(module, spec))
    return ReplicaRollout(rollout_on(module, narrow.compute_dtype, config, pad_token_id, exact), module)


def rollout_on(
    module: torch.nn.Module,
    dtype: torch.dtype,
    config: schema.SamplingConfig,
    pad_token_id: int,
    exact: BatchInvariantForward | None = None,
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
