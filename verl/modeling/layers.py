"""How the layers of a decoder are computed.

- "plain": as transformers writes them, one kernel per operation.
- "fused": by our own functions between their GEMMs: `layers_triton` on a GPU, `layers_cpu` on a CPU.
- "liger": by the Liger kernels.
- "batch_invariant": results for a token do not depend on the batch, GEMMs and attention included (`batch_invariant`).

Fused, over packed sequences, a layer returns two tensors, the residual stream without the last branch and the last
branch, because the norm that follows adds them. Queries, keys and values are one GEMM (`linear`), and so are gate and
up. Padded batches, and layers that are sharded by tensor parallelism or wrapped by adapters, use the forward pass of
transformers with those fused functions that apply.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial, partialmethod
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from verl.modeling.attention import packed_attention
from verl.modeling.fp8 import Fp8Linear, Fp8Matmul
from verl.modeling.linear import Embedding, FusedLinear, WeightCache, compute_dtype, layer_functions
from verl.modeling.model_types import LLAMA_LIKE, MIXTURES, VISION_LIKE
from verl.modeling.moe import expert_modules, set_experts_function
from verl.modeling.packing import Packing
from verl.modeling.vision import language_model_of

logger = logging.getLogger("verl.modeling")

Kernels = Literal["plain", "fused", "liger", "batch_invariant"]
States = torch.Tensor | tuple[torch.Tensor, torch.Tensor]

#: model type -> the sliding window of an attention layer, None without one
_WINDOWS: dict[str, Callable[[nn.Module], int | None]] = {
    "llama": lambda attention: None,
    "mistral": lambda attention: attention.config.sliding_window,
    "qwen2": lambda attention: attention.sliding_window,
    "qwen3": lambda attention: attention.sliding_window,
    "qwen2_vl_text": lambda attention: attention.sliding_window,
    "qwen2_5_vl_text": lambda attention: attention.sliding_window,
    "qwen3_vl_text": lambda attention: None,
    "mixtral": lambda attention: attention.config.sliding_window,
    "qwen3_moe": lambda attention: attention.sliding_window,
}
_HEAD_NORMS = ("qwen3", "qwen3_vl_text", "qwen3_moe")


def use_kernels(module: nn.Module, kernels: Kernels, cache: WeightCache) -> None:
    """Select the kernels of a HuggingFace decoder, in place. With "fused", a model type that is not supported stays
    plain, which is logged. cache: tells "fused" and FP8 layers when the weights do not change.

    Raises:
        ValueError: Liger is selected but not installed, or does not support the model.
    """
    for layer in module.modules():
        if isinstance(layer, Fp8Linear):
            layer.cache = cache
    if kernels == "fused":
        if language_model_of(module).config.model_type not in (*LLAMA_LIKE, *MIXTURES, *VISION_LIKE):
            logger.info("%s: fused kernels are not supported, layers run as in transformers", module.config.model_type)
            return
        fuse(module, cache)
    elif kernels == "liger":
        _use_liger(module)
    elif kernels == "batch_invariant":
        from verl.modeling.batch_invariant.model import use_batch_invariant

        use_batch_invariant(module)


def _use_liger(module: nn.Module) -> None:
    try:
        from liger_kernel.transformers.monkey_patch import (
            MODEL_TYPE_TO_APPLY_LIGER_FN,
            _apply_liger_kernel_to_instance,
        )
    except ModuleNotFoundError as error:
        raise ValueError("model.use_liger needs the package liger-kernel: install it, or set it to false") from error
    model_type = module.config.model_type
    if model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ValueError(f"model.use_liger: Liger does not support the model type {model_type!r}: set it to false")
    _apply_liger_kernel_to_instance(module)


# ---- fused layers ---------------------------------------------------------------------------------------------------


def fuse(module: nn.Module, cache: WeightCache) -> None:
    """Use fused functions in the layers of a Llama-like model, in place.

    Args:
        module: a HuggingFace model whose type is in `model_types.LLAMA_LIKE` or `MIXTURES`, or with a language model in
            `VISION_LIKE`.
        cache: knows when the weights do not change.
    """
    trunk = language_model_of(module)
    model_type, silu = trunk.config.model_type, trunk.config.hidden_act in ("silu", "swish")
    has_noise = bool(trunk.config.to_dict().get("router_jitter_noise"))
    head_norms = model_type in _HEAD_NORMS
    vision = module.config.to_dict().get("vision_config") or {}
    # after so many layers, features of images are added to the states (Qwen3-VL)
    added = len(vision.get("deepstack_visual_indexes") or ())
    layer_classes: dict[tuple[type, bool], type] = {}
    norms = [trunk.norm]
    for i, layer in enumerate(trunk.layers):
        attention = layer.self_attn
        norms += [layer.input_layernorm, layer.post_attention_layernorm]
        norms += [attention.q_norm, attention.k_norm] if head_norms else []
        attention.forward = partial(_attention, attention, cache, _WINDOWS[model_type], head_norms)
        if silu and expert_modules(layer.mlp):
            from verl.modeling.fused_experts import fused_experts

            set_experts_function(layer.mlp, partial(fused_experts, cache=cache))
            if not has_noise:  # the forward pass of transformers adds it
                layer.mlp.forward = partial(_mixture, layer.mlp)
        elif silu:
            layer.mlp.forward = partial(_mlp, layer.mlp, cache)
        # a subclass rather than an instance attribute: checkpointing wraps the forward of the class
        original, single_output = type(layer), i < added
        if (original, single_output) not in layer_classes:
            layer_classes[original, single_output] = type(
                original.__name__, (original,), {"forward": partialmethod(_layer, original, single_output)}
            )
        layer.__class__ = layer_classes[original, single_output]
    for norm in norms:
        norm.forward = partial(_norm, norm)
    if type(trunk.embed_tokens) is nn.Embedding:
        trunk.embed_tokens.forward = partial(_embedding, trunk.embed_tokens, cache)
    head = module.get_output_embeddings()
    if type(head) is nn.Linear:
        head.forward = partial(_head, head, cache)


def _layer(self: nn.Module, original: type, single_output: bool, hidden_states: States, **kwargs: Any) -> States:
    """The forward pass of a decoder layer of class `original`.

    Packed sequences pass (stream, branch) between layers; with `single_output`, the layer returns their sum.
    """
    sharded = isinstance(self.self_attn.o_proj.weight, DTensor)  # then a branch may be a pending reduction over ranks
    if "packing" not in kwargs or sharded:
        return original.forward(self, hidden_states, **kwargs)
    if isinstance(hidden_states, tuple):
        stream, x = _add_norm(self.input_layernorm, *hidden_states)
    else:
        stream, x = hidden_states, self.input_layernorm(hidden_states)
    x, _ = self.self_attn(hidden_states=x, **kwargs)
    stream, x = _add_norm(self.post_attention_layernorm, stream, x)
    branch = self.mlp(x)
    return stream + branch if single_output else (stream, branch)


def _add_norm(norm: nn.Module, stream: torch.Tensor, branch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weight, add_norm = norm.weight, layer_functions(stream).AddRMSNorm.apply
    return add_norm(stream, branch, weight, norm.variance_epsilon, compute_dtype(stream, weight))


def _norm(module: nn.Module, x: States) -> torch.Tensor:
    if isinstance(x, tuple):
        return _add_norm(module, *x)[1]
    if isinstance(x, DTensor):  # a norm of single heads under tensor parallelism
        return type(module).forward(module, x)
    return layer_functions(x).RMSNorm.apply(x, module.weight, module.variance_epsilon, compute_dtype(x, module.weight))


def _attention(
    module: nn.Module,
    cache: WeightCache,
    window: Callable[[nn.Module], int | None],
    head_norms: bool,
    /,  # layers may pass an argument named "cache"
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    packing: Packing | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """(1, N, hidden) -> (1, N, hidden)."""
    layers = (module.q_proj, module.k_proj, module.v_proj)
    cos, sin = position_embeddings
    sharded = any(isinstance(layer.weight, DTensor) for layer in layers)
    if packing is None or cos.shape[-1] != module.head_dim or cos.ndim != 3 or sharded:
        extra = {} if packing is None else {"packing": packing}
        return type(module).forward(
            module, hidden_states=hidden_states, position_embeddings=position_embeddings, **extra, **kwargs
        )
    norms = (module.q_norm, module.k_norm) if head_norms else ()
    heads, key_heads = (layer.out_features // module.head_dim for layer in layers[:2])
    if _can_fuse(layers, cache):
        qkv = _fused_linear(layers, cache, hidden_states)
    else:
        qkv = torch.cat([layer(hidden_states) for layer in layers], -1)
    heads_qkv = layer_functions(hidden_states).RotaryQKV.apply(
        qkv.squeeze(0),  # the gradient of indexing would be a copy
        cos[0],
        sin[0],
        (heads, key_heads),
        norms[0].variance_epsilon if norms else 0.0,
        *(norm.weight for norm in norms),
    )
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in heads_qkv)
    out, _ = packed_attention(module, q, k, v, None, packing, scaling=module.scaling, sliding_window=window(module))
    return _linear(module.o_proj, cache, out.flatten(2)), None


def _mlp(module: nn.Module, cache: WeightCache, x: torch.Tensor) -> torch.Tensor:
    swiglu = layer_functions(x).SwiGLU.apply
    layers = (module.gate_proj, module.up_proj)
    if x.is_cuda and _can_fuse(layers, cache):
        return _linear(module.down_proj, cache, swiglu(_fused_linear(layers, cache, x)))
    gate, up = (_linear(layer, cache, x) for layer in layers)  # on a CPU, strided halves are slow
    if isinstance(gate, DTensor):  # an MLP under tensor parallelism
        return module.down_proj(module.act_fn(gate) * up)
    return _linear(module.down_proj, cache, swiglu(gate, up))


def _mixture(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Router and experts: x (..., H) -> (..., H). Not a view, which FSDP2 does not support as the output of a layer."""
    _, weights, selected = module.gate(x)
    shape = (*x.shape[:-1], selected.shape[-1])
    return module.experts(x, selected.view(shape), weights.view(shape))


def _embedding(module: nn.Embedding, cache: WeightCache, ids: torch.Tensor) -> torch.Tensor:
    if cache.active and not isinstance(module.weight, DTensor):
        return Embedding.apply(ids, module.weight, module.padding_idx, cache)
    return type(module).forward(module, ids)


def _head(module: nn.Module, cache: WeightCache, states: torch.Tensor) -> torch.Tensor:
    if _can_fuse([module], cache):
        return _fused_linear([module], cache, states)
    return type(module).forward(module, states)


def _linear(module: nn.Module, cache: WeightCache, x: torch.Tensor) -> torch.Tensor:
    return _fused_linear([module], cache, x) if _can_fuse([module], cache) else module(x)


def _can_fuse(layers: Sequence[nn.Module], cache: WeightCache) -> bool:
    """Whether layers can be one GEMM: plain or FP8 linear layers, unsharded, and all or none of them trained."""
    return (
        cache.active
        and all(type(layer) in (nn.Linear, Fp8Linear) and not isinstance(layer.weight, DTensor) for layer in layers)
        and len({(layer.bias is None, layer.weight.requires_grad) for layer in layers}) == 1
    )


def _fused_linear(layers: Sequence[nn.Linear], cache: WeightCache, x: torch.Tensor) -> torch.Tensor:
    """The concatenated outputs of the layers for x (..., I): (..., O)."""
    weights = [layer.weight for layer in layers]
    biases = [layer.bias for layer in layers if layer.bias is not None]
    function = Fp8Matmul if isinstance(layers[0], Fp8Linear) else FusedLinear
    return function.apply(x, compute_dtype(x, weights[0]), cache, len(layers), *weights, *biases)
