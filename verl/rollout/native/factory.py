"""`rollout.name=native`: on the trainer's module, or on a copy that receives its weights."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

import verl.weight_sync as weight_sync  # loads its modules at use
from verl.config import schema
from verl.modeling.huggingface import read_config
from verl.rollout.base import RolloutEnv, SharesWeights
from verl.rollout.loading import empty_module, engine_dtype, load_module
from verl.rollout.native.engine import NativeRollout
from verl.rollout.native.model import is_readable
from verl.rollout.native.slices import KEY, SliceReceiver, Slices, check_sizes
from verl.rollout.native.speculation import PromptLookup
from verl.rollout.tensor_parallel import TensorParallel


def make_native(
    config: schema.RolloutEngineConfig,
    model: schema.ModelConfig,
    env: RolloutEnv,
    train_engine: SharesWeights | None = None,
) -> NativeRollout:
    """Make the native engine. It shares the trainer's module if that is unsharded and has no adapters.

    Raises:
        ValueError: the model is not supported, or `rollout.deterministic` without a training engine in this process.
    """
    deterministic = isinstance(config, schema.RolloutConfig) and config.deterministic
    forward = train_engine.model_forward() if deterministic and train_engine is not None else None
    if deterministic and forward is None:
        raise ValueError(
            "rollout.deterministic generates with the forward pass of the training engine, which is not in this "
            "process: set placement.rollout_devices=null"
        )
    options = {
        "max_rows": config.max_num_seqs,
        "memory_share": config.gpu_memory_utilization,
        "max_length": config.prompt_length + config.response_length,
        "max_response": config.response_length,
        "graphs": not config.enforce_eager,
        "records": isinstance(config, schema.RolloutConfig) and config.enable_rollout_routing_replay,
    }
    drafts = config.speculative
    if drafts.method is not None:
        lengths = drafts.prompt_lookup_max, drafts.prompt_lookup_min
        options["lookup"] = PromptLookup(drafts.num_speculative_tokens, *lengths)
    dtype = engine_dtype(config, env)
    hf = read_config(model.path, model.override_config, model.trust_remote_code)
    # before the model is loaded
    check_model(hf.architectures or (), hf.get_text_config().to_dict(), env.tp_size, deterministic)
    if env.tp_size > 1:
        return _make_tensor_parallel(model, env, train_engine, dtype, options)
    shared = None if train_engine is None or model.has_adapters else train_engine.shared_module()
    if shared is not None:
        narrow = None if dtype == next(shared.parameters()).dtype else dtype
        return NativeRollout(shared, dtype=narrow, forward=forward, **options)
    from verl.modeling.batch_invariant import model as batch_invariant

    attention = batch_invariant.NAME if deterministic else None
    if train_engine is None:
        module = load_module(model, dtype, env.device, attention)
        return NativeRollout(module, weights=weight_sync.ModuleReceiver(module, filled=True), **options)
    replica_dtype = env.compute_dtype or dtype
    module = empty_module(model, replica_dtype, env.device, train_engine.buffers(), attention)
    if forward is not None:  # the training computation, whose layers are gathered in the narrow dtype too
        batch_invariant.use_batch_invariant(module)
        forward = batch_invariant.BatchInvariantForward(_Replica(module, forward.model.autocast_to))
    narrow = None if dtype == replica_dtype else dtype
    return NativeRollout(module, dtype=narrow, forward=forward, weights=weight_sync.ModuleReceiver(module), **options)


def check_model(architectures: Iterable[str], sizes: Mapping[str, Any], ranks: int, deterministic: bool) -> None:
    """Raise ValueError for a model that this engine does not support, or cannot split over `ranks`.

    Args:
        architectures: class names of the saved weights.
        sizes: the model's config by key.
        ranks: the tensor-parallel size.
        deterministic: `rollout.deterministic`.
    """
    import transformers

    for architecture in architectures:
        # other heads are ignored when the model is loaded
        names_head = "LMHead" in architecture or architecture.endswith(("ForCausalLM", "ForConditionalGeneration"))
        if names_head and not is_readable(architecture, sizes):
            if ranks > 1:
                raise ValueError(f"{KEY}={ranks} is not supported for {architecture}, which has no fused layers: use 1")
            if deterministic:
                raise ValueError(
                    f"rollout.deterministic is not supported for {architecture}, which has no fused layers: use false"
                )
            # None: the code comes with the model, and is checked when it is loaded
            if (model_class := getattr(transformers, architecture, None)) is not None:
                from verl.rollout.native.generic.model import check_forward  # only for models without fused layers

                check_forward(model_class, transformers.AutoConfig.for_model(**sizes))
    if ranks > 1:
        check_sizes(sizes, ranks)


def _make_tensor_parallel(
    model: schema.ModelConfig,
    env: RolloutEnv,
    train_engine: SharesWeights | None,
    dtype: torch.dtype,
    options: dict[str, Any],
) -> NativeRollout:
    """The engine of one rank of a tensor-parallel group: a module with slices of the parameters."""
    tp = TensorParallel.from_env(env)
    slices = Slices(read_config(model.path, model.override_config, model.trust_remote_code), tp)
    shapes: dict[str, torch.Size] = {}

    def cut(module: nn.Module) -> None:
        shapes.update((name, p.shape) for name, p in module.named_parameters())
        slices.cut(module)

    # without a trainer in this process, the weights are those of the files until others are pushed
    loaded = load_module(model, dtype, torch.device("cpu")) if train_engine is None else None
    buffers = train_engine.buffers() if loaded is None else loaded.named_buffers()
    replica_dtype = dtype if loaded is not None or env.compute_dtype is None else env.compute_dtype
    module = empty_module(model, replica_dtype, env.device, buffers, cut=cut)
    receiver = SliceReceiver(module, slices, shapes)
    if loaded is not None:
        receiver.receive(loaded.named_parameters(), 0)
    narrow = None if dtype == replica_dtype else dtype
    return NativeRollout(module, dtype=narrow, weights=receiver, tp=tp, **options)


class _Replica(nn.Module):
    """A copy of the trained model with the interface that `BatchInvariantForward` reads. autocast_to: as in
    training."""

    def __init__(self, module: nn.Module, autocast_to: torch.dtype | None):
        super().__init__()
        self.module = module
        self.autocast_to = autocast_to
        self.softcap = module.config.to_dict().get("final_logit_softcapping")

    def get_trunk(self) -> nn.Module:
        return self.module.base_model

    def head(self, states: torch.Tensor) -> torch.Tensor:
        logits = self.module.get_output_embeddings()(states)
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)
