"""Decoder layers like Llama's with what stands between their matrix products in few kernels (`layers_triton`), or on a
CPU in few passes over memory (`layers_cpu`).

Over packed rows a layer hands on two tensors, the sum of all branches but the last and the last branch, since the norm
that follows adds them up on its way. Queries, keys and values are one product, and so are gate and up (`products`).
Everything else (padded rows, layers that tensor parallelism spreads or adapters wrap) takes the layer's own way, with
the fused parts that fit.
"""

from collections.abc import Callable, Sequence
from functools import partial, partialmethod
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from verl.modeling import layers_cpu
from verl.modeling.attention import packed_attention
from verl.modeling.layers import compute_dtype
from verl.modeling.linear import Embedding, Phase, Product
from verl.modeling.packing import Packing

States = torch.Tensor | tuple[torch.Tensor, torch.Tensor]

#: model type -> the keys that an attention layer's queries see, None for all
_WINDOWS: dict[str, Callable[[nn.Module], int | None]] = {
    "llama": lambda attention: None,
    "mistral": lambda attention: attention.config.sliding_window,
    "qwen2": lambda attention: attention.sliding_window,
    "qwen3": lambda attention: attention.sliding_window,
}


def fuse(module: nn.Module, phase: Phase) -> None:
    """Let the layers of a model, of a type in LLAMA_LIKE, compute so. phase: when its weights do not change."""
    kind, trunk = module.config.model_type, module.base_model
    silu, head_norms = module.config.hidden_act in ("silu", "swish"), kind == "qwen3"
    layer_classes: dict[type, type] = {}
    norms = [trunk.norm]
    for layer in trunk.layers:
        attention = layer.self_attn
        norms += [layer.input_layernorm, layer.post_attention_layernorm]
        norms += [attention.q_norm, attention.k_norm] if head_norms else []
        attention.forward = partial(_attention, attention, phase, _WINDOWS[kind], head_norms)
        if silu:
            layer.mlp.forward = partial(_mlp, layer.mlp, phase)
        # a class, not a function of the instance: checkpointing wraps what a class calls forward
        own = type(layer)
        if own not in layer_classes:
            layer_classes[own] = type(own.__name__, (own,), {"forward": partialmethod(_layer, own)})
        layer.__class__ = layer_classes[own]
    for norm in norms:
        norm.forward = partial(_norm, norm)
    if type(trunk.embed_tokens) is nn.Embedding:
        trunk.embed_tokens.forward = partial(_embedding, trunk.embed_tokens, phase)
    head = module.get_output_embeddings()
    if type(head) is nn.Linear:
        head.forward = partial(_head, head, phase)


def _functions(x: torch.Tensor) -> ModuleType:
    """The functions between products for tensors like x: kernels on a GPU, else plain torch."""
    if x.is_cuda:
        from verl.modeling import layers_triton  # needs triton, which only torch for GPUs brings

        return layers_triton
    return layers_cpu


def _layer(self: nn.Module, own: type, hidden_states: States, **others: Any) -> States:
    """The forward pass of a decoder layer of the class `own`; over packed rows it takes and gives (sum, branch)."""
    spread = isinstance(self.mlp.down_proj.weight, DTensor)  # then a branch may still be on its way from other ranks
    if "packing" not in others or spread:
        return own.forward(self, hidden_states, **others)
    if isinstance(hidden_states, tuple):
        stream, x = _add_norm(self.input_layernorm, *hidden_states)
    else:
        stream, x = hidden_states, self.input_layernorm(hidden_states)
    x, _ = self.self_attn(hidden_states=x, **others)
    stream, x = _add_norm(self.post_attention_layernorm, stream, x)
    return stream, self.mlp(x)


def _add_norm(norm: nn.Module, stream: torch.Tensor, branch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weight, add_norm = norm.weight, _functions(stream).AddRMSNorm.apply
    return add_norm(stream, branch, weight, norm.variance_epsilon, compute_dtype(stream, weight))


def _norm(module: nn.Module, x: States) -> torch.Tensor:
    if isinstance(x, tuple):
        return _add_norm(module, *x)[1]
    if isinstance(x, DTensor):  # a norm of heads that tensor parallelism spreads
        return type(module).forward(module, x)
    return _functions(x).RMSNorm.apply(x, module.weight, module.variance_epsilon, compute_dtype(x, module.weight))


def _attention(
    module: nn.Module,
    phase: Phase,
    window: Callable[[nn.Module], int | None],
    head_norms: bool,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    packing: Packing | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """(1, N, hidden) -> (1, N, hidden)."""
    layers = (module.q_proj, module.k_proj, module.v_proj)
    cos, sin = position_embeddings
    spread = any(isinstance(layer.weight, DTensor) for layer in layers)
    if packing is None or cos.shape[-1] != module.head_dim or spread:
        extra = {} if packing is None else {"packing": packing}
        return type(module).forward(
            module, hidden_states=hidden_states, position_embeddings=position_embeddings, **extra, **others
        )
    norms = (module.q_norm, module.k_norm) if head_norms else ()
    heads, key_heads = (layer.out_features // module.head_dim for layer in layers[:2])
    one = _are_one(layers, phase)
    qkv = _product(layers, phase, hidden_states) if one else torch.cat([layer(hidden_states) for layer in layers], -1)
    parts = _functions(hidden_states).RotaryQKV.apply(
        qkv.squeeze(0),  # an index would cost its gradient a copy
        cos[0],
        sin[0],
        (heads, key_heads),
        norms[0].variance_epsilon if norms else 0.0,
        *(norm.weight for norm in norms),
    )
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in parts)
    out, _ = packed_attention(module, q, k, v, None, packing, scaling=module.scaling, sliding_window=window(module))
    return _linear(module.o_proj, phase, out.flatten(2)), None


def _mlp(module: nn.Module, phase: Phase, x: torch.Tensor) -> torch.Tensor:
    swiglu = _functions(x).SwiGLU.apply
    layers = (module.gate_proj, module.up_proj)
    if x.is_cuda and _are_one(layers, phase):
        return _linear(module.down_proj, phase, swiglu(_product(layers, phase, x)))
    gate, up = (_linear(layer, phase, x) for layer in layers)  # on a CPU, functions of halves of rows are slow
    if isinstance(gate, DTensor):  # of an MLP that tensor parallelism spreads
        return module.down_proj(module.act_fn(gate) * up)
    return _linear(module.down_proj, phase, swiglu(gate, up))


def _embedding(module: nn.Embedding, phase: Phase, ids: torch.Tensor) -> torch.Tensor:
    if phase.on and not isinstance(module.weight, DTensor):
        return Embedding.apply(ids, module.weight, module.padding_idx, phase)
    return type(module).forward(module, ids)


def _head(module: nn.Module, phase: Phase, states: torch.Tensor) -> torch.Tensor:
    return _product([module], phase, states) if _are_one([module], phase) else type(module).forward(module, states)


def _linear(module: nn.Module, phase: Phase, x: torch.Tensor) -> torch.Tensor:
    return _product([module], phase, x) if _are_one([module], phase) else module(x)


def _are_one(layers: Sequence[nn.Module], phase: Phase) -> bool:
    """Whether layers can be one product: they are plain, whole, and trained alike."""
    return (
        phase.on
        and all(type(layer) is nn.Linear and not isinstance(layer.weight, DTensor) for layer in layers)
        and len({(layer.bias is None, layer.weight.requires_grad) for layer in layers}) == 1
    )


def _product(layers: Sequence[nn.Linear], phase: Phase, x: torch.Tensor) -> torch.Tensor:
    """What the layers give for x (..., I), side by side: (..., O)."""
    weights = [layer.weight for layer in layers]
    biases = [layer.bias for layer in layers if layer.bias is not None]
    return Product.apply(x, compute_dtype(x, weights[0]), phase, len(layers), *weights, *biases)
