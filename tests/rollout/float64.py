"""A decoder in float64, without code of the package or of transformers, whose norms and rotary tables are in float32.

Llama and Qwen2: what errors of float32 are measured against.
"""

import torch
from torch import nn
from torch.nn import functional as F


@torch.no_grad()
def float64_logits(module: nn.Module, ids: list[int]) -> torch.Tensor:
    """(T, V) float64 logits of a Llama or Qwen2 with the weights of `module`."""
    config, trunk = module.config, module.model
    heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, trunk.layers[0].self_attn.head_dim
    assert config.model_type in ("llama", "qwen2") and config.rope_parameters["rope_type"] == "default"
    at = torch.arange(len(ids), device=module.device, dtype=torch.float64)
    exponents = torch.arange(0, size, 2, device=module.device, dtype=torch.float64) / size
    angles = at[:, None, None] * config.rope_parameters["rope_theta"] ** -exponents

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() * weight.double()

    def linear(x: torch.Tensor, layer: nn.Linear) -> torch.Tensor:
        return F.linear(x, layer.weight.double(), None if layer.bias is None else layer.bias.double())

    def rotated(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    x = trunk.embed_tokens.weight.double()[torch.tensor(ids, device=module.device)]
    future = torch.ones(len(ids), len(ids), dtype=torch.bool, device=module.device).triu(1)
    for layer in trunk.layers:
        attention, mlp, h = layer.self_attn, layer.mlp, norm(x, layer.input_layernorm.weight)
        q = rotated(linear(h, attention.q_proj).view(len(ids), heads, size))
        k = rotated(linear(h, attention.k_proj).view(len(ids), kv_heads, size))
        v = linear(h, attention.v_proj).view(len(ids), kv_heads, size)
        k, v = (each.repeat_interleave(heads // kv_heads, 1) for each in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / size**0.5
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        x = x + linear(torch.einsum("hqk,khd->qhd", weights, v).flatten(1), attention.o_proj)
        h = norm(x, layer.post_attention_layernorm.weight)
        x = x + linear(F.silu(linear(h, mlp.gate_proj)) * linear(h, mlp.up_proj), mlp.down_proj)
    return linear(norm(x, trunk.norm.weight), module.lm_head)
