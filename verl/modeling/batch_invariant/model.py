"""The training engine's forward pass, made batch-invariant and shared with the rollout: `rollout.deterministic`.

The log-probs of sampling are bit-identical to those of training only if both use the same operations. So generation
calls the module of the training engine, token by token, with its rounding, autocast and kernels, and the result for a
token must not depend on the batch. In a decoder only four functions read more than one token or leave the order of a
sum to a library:

- linear layers, including the head: `linear`
- attention: `batch_invariant.attention`, over packed sequences in training and over the KV cache in generation
- norms and log-sum-exp: one kernel program per row on a GPU; torch, or chunks of one shape, on a CPU
- elementwise functions: torch on a GPU; chunks of one shape on a CPU

`use_batch_invariant` puts them into a module; `BatchInvariantForward` is what the rollout engine calls. Gradients are
those of the standard functions.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import AttentionInterface
from transformers.activations import ACT2FN

from verl.modeling import fp8
from verl.modeling.attention import packed_attention
from verl.modeling.batch_invariant import chunked
from verl.modeling.batch_invariant.attention import Attend, attend_rows
from verl.modeling.batch_invariant.chunked import Scores, elementwise
from verl.modeling.linear import compute_dtype
from verl.modeling.log_probs import logit_statistics
from verl.modeling.packing import Packing

NAME = "verl_batch_invariant"

_ACTIVATIONS = tuple(type(ACT2FN[name]) for name in ("silu", "gelu", "gelu_pytorch_tanh"))


class _LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        functions = chunked
        if x.is_cuda:
            # triton comes only with torch for GPUs
            from verl.modeling.batch_invariant import triton_kernels as functions
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
    return _LinearFunction.apply(x, weight, bias)


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


class _Linear:
    """The forward pass of one linear layer. `cast`: its parameters in the compute dtype, while they are valid."""

    def __init__(self, module: nn.Linear):
        self.module = module
        self.cast: tuple[torch.Tensor | None, ...] | None = None

    def computed(self, dtype: torch.dtype) -> tuple[torch.Tensor | None, ...]:
        """The parameters in the dtype of the computation."""
        return tuple(x if x is None else x.detach().to(dtype) for x in (self.module.weight, self.module.bias))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.cast or (self.module.weight, self.module.bias)
        dtype = compute_dtype(x, weight)
        return linear(x.to(dtype), weight.to(dtype), bias if bias is None else bias.to(dtype))


class _Fp8Linear(_Linear):
    """The forward pass of a linear layer in FP8; `cast` has codes, their scales, and the bias.

    On a GPU the GEMM adds the 128 terms of a group, and then the groups, in one order for any number of rows.
    """

    def computed(self, dtype: torch.dtype) -> tuple[torch.Tensor | None, ...]:
        weights, bias = [self.module.weight], self.module.bias
        codes, scales, _ = fp8.quantize_weights(weights, dtype, emulated=not fp8.has_kernels(weights, dtype))
        return codes, scales, bias if bias is None else bias.detach().to(dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.module.weight, self.module.bias
        dtype = compute_dtype(x, weight)
        x = x.to(dtype)
        if fp8.has_kernels([weight], dtype):
            if self.cast is None:
                return fp8.Fp8Linear.forward(self.module, x)
            codes, scales, bias = self.cast
            inputs = fp8.quantize_rows(x.reshape(-1, x.shape[-1]), emulated=False)
            return fp8.matmul(inputs, fp8.Quantized(codes, scales), bias).view(*x.shape[:-1], -1)
        values = self.cast[0] if self.cast else straight_through(weight.to(dtype), fp8.BLOCK)
        rows = straight_through(x.reshape(-1, x.shape[-1]), 1)
        return linear(rows, values, bias if bias is None else bias.to(dtype)).view(*x.shape[:-1], -1)


def straight_through(x: torch.Tensor, rows: int) -> torch.Tensor:
    """`fp8.rounded`, with the gradient of x."""
    return with_gradient_of(lambda x: x, partial(fp8.rounded, rows=rows), x)


def _activation(standard: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return standard(x) if x.is_cuda else with_gradient_of(standard, partial(elementwise, standard), x)


def _norm(module: nn.Module, gemma: bool, x: torch.Tensor) -> torch.Tensor:
    if not x.is_cuda:
        return type(module).forward(module, x)
    if gemma:
        return rms_norm(x, 1 + module.weight.float(), module.eps, x.dtype)
    return rms_norm(x, module.weight, module.variance_epsilon, compute_dtype(x, module.weight))


def use_batch_invariant(module: nn.Module) -> None:
    """Make a HuggingFace decoder that was built with the attention `NAME` batch-invariant, in place."""
    for child in module.modules():
        name = type(child).__name__
        if type(child) is nn.Linear:
            child.forward = _Linear(child)
        elif isinstance(child, fp8.Fp8Linear):
            child.forward = _Fp8Linear(child)
        elif isinstance(child, _ACTIVATIONS):
            child.forward = partial(_activation, child.forward)
        elif name.endswith("RMSNorm"):
            child.forward = partial(_norm, child, name.startswith("Gemma"))
        elif name.endswith("RotaryEmbedding") and child.rope_type == "longrope":
            # it would read the last position from the device, which a CUDA graph cannot; sampled sequences stay below
            # the position at which its frequencies change (the rollout's max_positions)
            child.rope_type = "default"


def batch_invariant_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    packing: Packing | None = None,
    attend: Attend | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention inside the sequences of `packing`, or by the rollout's `attend`.

    query (1, HQ, N, D), key and value (1, HK, N, D) -> (1, N, HQ, D).
    """
    query, key = query.to(value.dtype), key.to(value.dtype)  # as in packed_attention
    scores = Scores(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap)

    def ours(*inputs: torch.Tensor) -> torch.Tensor:
        q, k, v = (x[0].transpose(0, 1) for x in inputs)
        if attend is not None:
            return attend(module.layer_idx, q, k, v, scores)[None]
        if packing.keys is None:
            return attend_rows(q, k, v, packing.lengths, scores)[None]
        # shared prefix: every row with all of its tokens, then each token once
        rows = (x[packing.keys.source] for x in (q, k, v))
        return attend_rows(*rows, packing.keys.packing.lengths, scores)[packing.keys.representative][None]

    def standard(*inputs: torch.Tensor) -> torch.Tensor:
        return packed_attention(module, *inputs, None, packing, scores.scale, scores.window, scores.softcap)[0]

    return with_gradient_of(standard, ours, query, key, value), None


class BatchInvariantForward:
    """The forward pass for generation of an `engines.loading.TokenModel` with kernels "batch_invariant". N tokens of
    any sequences, V vocabulary."""

    def __init__(self, model: nn.Module):
        self.model = model
        forwards = (vars(child).get("forward") for child in model.modules())
        self.linears = [forward for forward in forwards if isinstance(forward, _Linear)]
        self._casts: list[tuple[torch.Tensor | None, ...]] = []

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of keys and values."""
        return self.model.autocast_to or self.model.module.dtype

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Context in which the weights do not change, so they are cast to the compute dtype only once."""
        if self.model.autocast_to is not None:
            # into the memory of the previous phase, if any, since CUDA graphs contain its addresses
            for layer, cast in zip(self.linears, self._casts):
                for x, y in zip(cast, layer.computed(self.dtype)):
                    if x is not None:
                        x.copy_(y)
            self._casts = self._casts or [layer.computed(self.dtype) for layer in self.linears]
            for layer, cast in zip(self.linears, self._casts):
                layer.cast = cast
        try:
            yield
        finally:
            for layer in self.linears:
                layer.cast = None

    def release(self) -> None:
        """Free the memory of the cast weights."""
        self._casts = []

    def states(self, ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """ids, positions (N,) -> hidden states (N, H) after the last norm."""
        with self._autocast():
            return self.model.get_trunk()(
                input_ids=ids[None], position_ids=positions[None], use_cache=False, attend=attend
            ).last_hidden_state[0]

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """(N, H) -> (N, V), not scaled by a temperature."""
        with self._autocast():
            return self.model.head(states)

    def log_probs(self, logits: torch.Tensor, tokens: torch.Tensor, temperature: float) -> torch.Tensor:
        """Log-probs of tokens (N,) under softmax(logits (N, V) / temperature): (N,) float32."""
        statistics = logit_statistics(logits, tokens, temperature, (True, False, False), batch_invariant=True)
        return statistics[1].float()

    def _autocast(self) -> torch.autocast:
        dtype, device_type = self.model.autocast_to, self.model.module.device.type
        return torch.autocast(device_type, dtype, enabled=dtype is not None, cache_enabled=False)


AttentionInterface.register(NAME, batch_invariant_attention)
