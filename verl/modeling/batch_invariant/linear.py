"""Batch-invariant functions of single tokens, with the gradients of the standard functions. N tokens."""

from collections.abc import Callable

import torch
from torch.nn import functional as F

from verl.modeling.batch_invariant import chunked


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        functions = chunked
        if x.is_cuda:
            from verl.modeling.batch_invariant import (
                triton_kernels as functions,
            )  # triton comes only with torch for GPUs
        return functions.linear(x.reshape(-1, x.shape[-1]), weight, bias).view(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])
        gx = (rows @ weight).view(x.shape) if ctx.needs_input_grad[0] else None
        gw = rows.t() @ x.reshape(-1, x.shape[-1]) if ctx.needs_input_grad[1] else None
        return gx, gw, rows.sum(0) if ctx.needs_input_grad[2] else None


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x (..., in), weight (out, in), bias (out,) or None, of one dtype -> (..., out)."""
    return _Linear.apply(x, weight, bias)


class _WithGradientOf(torch.autograd.Function):
    """compute(*inputs) with the gradient of standard(*inputs), the same function with another rounding."""

    @staticmethod
    def forward(ctx, standard: Callable, compute: Callable, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.standard = standard
        ctx.save_for_backward(*inputs)
        return compute(*inputs)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        needed = ctx.needs_input_grad[2:]
        inputs = [x.detach().requires_grad_(want) for x, want in zip(ctx.saved_tensors, needed)]
        with torch.enable_grad():
            output = ctx.standard(*inputs)
        gradients = iter(torch.autograd.grad(output, [x for x in inputs if x.requires_grad], gradient))
        return None, None, *(next(gradients) if want else None for want in needed)


with_gradient_of = _WithGradientOf.apply


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype) -> torch.Tensor:
    """On a GPU: weight (D,) * x (..., D) / sqrt(mean(x^2) + eps), computed in float32, in `dtype`."""
    from verl.modeling.batch_invariant import triton_kernels

    def standard(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(dtype)

    return with_gradient_of(standard, lambda x, weight: triton_kernels.rms_norm(x, weight, eps, dtype), x, weight)
