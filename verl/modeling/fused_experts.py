"""The experts of a layer as one differentiable function over grouped matmuls.

Only the input, the weights of the tokens and the output of the first matmul are kept for the backward pass. Rows are
gathered and the activation is computed again there, which costs memory bandwidth but saves the N k rows of every
matmul. The weight of a token is multiplied into the activation, before the second matmul and its rounding, so that its
gradient does not need the output of every expert.

N tokens, E experts, k per token, S = N k pairs of a token and an expert, H hidden size, I width of an expert.
"""

import torch
from torch import nn
from torch.nn import functional as F

from verl.modeling.linear import WeightCache, compute_dtype, layer_functions
from verl.modeling.moe import by_expert, fits_grouped_matmul, inverse, plain_experts


def fused_experts(
    module: nn.Module, x: torch.Tensor, selected: torch.Tensor, weights: torch.Tensor, cache: WeightCache
) -> torch.Tensor:
    """The weighted sum of the chosen experts, for the activation SiLU; see `moe.ExpertsFunction`.

    Args:
        module: experts with the parameters gate_up_proj (E, 2 I, H) and down_proj (E, H, I).
        x: (..., H).
        selected, weights: (..., k), experts of each token and their weights.
        cache: knows when the weights do not change.

    Returns:
        (..., H), with the dtype of x.
    """
    gate_up, down = module.gate_up_proj, module.down_proj
    dtype = compute_dtype(x, gate_up)
    # weights with adapters are computed anew in every forward pass, so the cache cannot know them
    has_adapters = not (isinstance(gate_up, nn.Parameter) and isinstance(down, nn.Parameter))
    if has_adapters or not fits_grouped_matmul(gate_up, down, dtype):
        return plain_experts(module, x, selected, weights)
    return FusedExperts.apply(x, weights, selected, dtype, cache, gate_up, down)


class FusedExperts(torch.autograd.Function):
    """See `fused_experts`."""

    @staticmethod
    def forward(
        ctx,
        x: torch.Tensor,
        weights: torch.Tensor,
        selected: torch.Tensor,
        dtype: torch.dtype,
        cache: WeightCache,
        gate_up: nn.Parameter,
        down: nn.Parameter,
    ) -> torch.Tensor:
        functions = layer_functions(x)
        order, counts = by_expert(selected, len(gate_up))
        back, ends = inverse(order), counts.cumsum(0, dtype=torch.int32)
        ctx.cache, ctx.parameters = cache, (gate_up, down)
        ctx.dtypes, ctx.shape = (x.dtype, weights.dtype), selected.shape
        x, scale = x.to(dtype).flatten(0, -2), weights.flatten()[order]
        rows = x[order // selected.shape[-1]]
        hidden = _grouped(rows, cache.concatenated([gate_up], dtype).transpose(1, 2), ends)
        del rows
        activation = functions.scaled_swiglu(hidden, scale)
        outputs = _grouped(activation, cache.concatenated([down], dtype).transpose(1, 2), ends)
        ctx.save_for_backward(x, scale, order, back, ends, hidden)
        return functions.sum_of_uses(outputs, back.view(selected.shape)).to(ctx.dtypes[0])

    @staticmethod
    def backward(ctx, g: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, scale, order, back, ends, hidden = ctx.saved_tensors
        (gate_up, down), back = ctx.parameters, back.view(ctx.shape)
        functions, tokens = layer_functions(x), order // ctx.shape[-1]
        g = g.to(x.dtype).flatten(0, -2)[tokens]
        g_activation = _grouped(g, ctx.cache.concatenated([down], x.dtype), ends)
        activation, g_hidden, g_scale = functions.scaled_swiglu_gradient(g_activation, hidden, scale)
        g_down = _weight_gradient(ctx.cache, down, g, activation, ends, ctx.needs_input_grad[6])
        del g, activation, g_activation
        g_gate_up = _weight_gradient(ctx.cache, gate_up, g_hidden, x[tokens], ends, ctx.needs_input_grad[5])
        gx = _grouped(g_hidden, ctx.cache.concatenated([gate_up], x.dtype), ends)
        gx = functions.sum_of_uses(gx, back).to(ctx.dtypes[0])
        return gx, g_scale[back].to(ctx.dtypes[1]), None, None, None, g_gate_up, g_down


def _grouped(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Rows sorted by expert (S, A) times the weight of their expert (E, A, B): (S, B). S may be 0."""
    return F.grouped_mm(rows, weight, offs=ends) if len(rows) else rows.new_zeros(0, weight.shape[-1])


def _weight_gradient(
    cache: WeightCache, weight: nn.Parameter, g: torch.Tensor, rows: torch.Tensor, ends: torch.Tensor, is_needed: bool
) -> torch.Tensor | None:
    """The gradient of a weight (E, B, A) from those of its outputs (S, B) and its inputs (S, A).

    Returns None if it is not needed, or if the cache accumulates it.
    """
    if not is_needed:
        return None
    gradient = F.grouped_mm(g.t(), rows, offs=ends) if len(rows) else torch.zeros_like(weight, dtype=rows.dtype)
    if not cache.accumulates_gradients:
        return gradient.to(weight.dtype)
    cache.accumulate([weight], gradient)
    return None
