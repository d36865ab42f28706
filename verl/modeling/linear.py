"""Linear layers over weights that are cast once, with gradients accumulated outside of autograd.

Under autocast a float32 weight is cast in every forward pass, and its gradient arrives in 16 bits, is cast back and is
added up in every backward pass. With a `WeightCache`, while the weights do not change, a weight is cast once, and the
backward GEMM accumulates into `.grad` directly, in the parameter's dtype, without rounding in between. Linear layers
that read the same input are fused into one GEMM over their concatenated weights.

N: tokens; I: input features; O: output features of all fused layers.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import nn

from verl.modeling import layers_cpu


class WeightCache:
    """Casts of weights and their accumulated gradients, for a phase in which the weights do not change.

    Outside of `fixed_weights`, layers compute as torch does.
    """

    def __init__(self) -> None:
        self.active = self._keeps = self.accumulates_gradients = False
        self._kept: dict[tuple, Any] = {}
        self._gradients: dict[tuple[int, ...], torch.Tensor] = {}

    @contextmanager
    def fixed_weights(self, keep: bool, accumulate_gradients: bool) -> Iterator[None]:
        """Context in which the weights do not change.

        Args:
            keep: cast a weight once instead of at every use; requires unsharded weights.
            accumulate_gradients: write gradients to `.grad` here and not through autograd. `.grad` must be None at the
                start, and nothing else (such as a hook) may wait for the gradients.
        """
        self.active, self._keeps, self.accumulates_gradients = True, keep, accumulate_gradients
        try:
            yield
        finally:
            self.active = self._keeps = self.accumulates_gradients = False
            self._kept.clear()
            self._gradients.clear()

    def concatenated(self, parameters: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """The parameters (o_i, ...) as one tensor (O, ...) of a dtype."""
        if len(parameters) == 1 and parameters[0].dtype == dtype:
            return parameters[0].detach()

        def cast() -> torch.Tensor:
            rows = sum(p.shape[0] for p in parameters)
            result = parameters[0].new_empty((rows, *parameters[0].shape[1:]), dtype=dtype, requires_grad=False)
            for chunk, parameter in zip(result.split([p.shape[0] for p in parameters]), parameters):
                chunk.copy_(parameter.detach())
            return result

        return self.kept(tuple(map(id, parameters)), cast)

    def kept(self, key: tuple, make: Callable[[], Any]) -> Any:
        """`make()`, which depends on the weights; while they are kept, that of the first call with this key."""
        value = self._kept[key] if key in self._kept else make()
        if self._keeps:
            self._kept[key] = value
        return value

    def accumulate_matmul(self, parameters: Sequence[nn.Parameter], g: torch.Tensor, x: torch.Tensor) -> None:
        """Add g^T x to the gradients of weights. g: (N, O). x: (N, I)."""
        old, dtype = self._gradient(parameters), parameters[0].dtype
        if old is None:
            wide = {} if dtype == g.dtype else {"out_dtype": dtype}  # float32
            self._keep_gradient(parameters, torch.mm(g.t(), x, **wide))
        elif old.dtype == x.dtype:
            old.addmm_(g.t(), x)
        else:
            torch.ops.aten.addmm.dtype_out(old, g.t(), x, old.dtype, out=old)

    def accumulate(self, parameters: Sequence[nn.Parameter], gradient: torch.Tensor) -> None:
        """Add a gradient (O, ...) to those of parameters."""
        old = self._gradient(parameters)
        if old is None:
            self._keep_gradient(parameters, gradient.to(parameters[0].dtype))
        else:
            old.add_(gradient)

    def _gradient(self, parameters: Sequence[nn.Parameter]) -> torch.Tensor | None:
        return parameters[0].grad if len(parameters) == 1 else self._gradients.get(tuple(map(id, parameters)))

    def _keep_gradient(self, parameters: Sequence[nn.Parameter], gradient: torch.Tensor) -> None:
        """Let `.grad` of the parameters be views of one tensor, which later GEMMs accumulate into."""
        self._gradients[tuple(map(id, parameters))] = gradient
        for chunk, parameter in zip(gradient.split([p.shape[0] for p in parameters]), parameters):
            parameter.grad = chunk


def layer_functions(x: torch.Tensor) -> ModuleType:
    """The functions between GEMMs for tensors like x: Triton kernels on a GPU, otherwise plain torch."""
    if x.is_cuda:
        from verl.modeling import layers_triton  # triton comes only with torch for GPUs

        return layers_triton
    return layers_cpu


def compute_dtype(x: torch.Tensor, weight: torch.Tensor) -> torch.dtype:
    """The dtype in which torch computes the GEMM of x and weight: autocast's, or the result type."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return torch.result_type(x, weight)


def _column_sums(x: torch.Tensor) -> torch.Tensor:
    """The sums over the rows of x (N, D), in float32 at least."""
    if not x.is_cuda or x.dtype == torch.float64:
        return x.sum(0, dtype=torch.promote_types(x.dtype, torch.float32))
    from verl.modeling.layers_triton import column_sums

    return column_sums(x)


class Embedding(torch.autograd.Function):
    """weight[ids]: ids (...), weight (V, D) -> (..., D). `padding`: an id without gradient, or None.

    Accumulates into an existing gradient in place, without a (V, D) tensor that is zero nearly everywhere. The order of
    the sums is deterministic.
    """

    @staticmethod
    def forward(ctx, ids: torch.Tensor, weight: nn.Parameter, padding: int | None, cache: WeightCache) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.weight, ctx.padding, ctx.cache = weight, padding, cache
        return nn.functional.embedding(ids, weight)

    @staticmethod
    def backward(ctx, g: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (ids,) = ctx.saved_tensors
        weight, padding = ctx.weight, ctx.padding
        if not ctx.cache.accumulates_gradients or weight.grad is None:
            padding_index = -1 if padding is None else padding
            return None, torch.ops.aten.embedding_dense_backward(g, ids, len(weight), padding_index, False), None, None
        if padding is not None:
            g = g.masked_fill((ids == padding).unsqueeze(-1), 0)
        weight.grad.index_put_((ids.flatten(),), g.flatten(0, -2).to(weight.grad.dtype), accumulate=True)
        return None, None, None, None


class FusedLinear(torch.autograd.Function):
    """x W^T + b of several linear layers as one GEMM: (..., I) -> (..., O) in `dtype`.

    `parameters`: the weights of the layers, then their biases.
    """

    @staticmethod
    def forward(
        ctx, x: torch.Tensor, dtype: torch.dtype, cache: WeightCache, layers: int, *parameters: nn.Parameter
    ) -> torch.Tensor:
        weights, biases = parameters[:layers], parameters[layers:]
        ctx.cache, ctx.weights, ctx.biases, ctx.dtypes = cache, weights, biases, (x.dtype, dtype)
        x = x.to(dtype)
        ctx.save_for_backward(x if any(ctx.needs_input_grad[4:]) else None)
        bias = cache.concatenated(biases, dtype) if biases else None
        return nn.functional.linear(x, cache.concatenated(weights, dtype), bias)

    @staticmethod
    def backward(ctx, g: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        x_dtype, dtype = ctx.dtypes
        gx = None
        if ctx.needs_input_grad[0]:
            gx = torch.matmul(g, ctx.cache.concatenated(ctx.weights, dtype)).to(x_dtype)
        return gx, None, None, None, *parameter_gradients(ctx, g, x)


def parameter_gradients(ctx: Any, g: torch.Tensor, x: torch.Tensor | None) -> list[torch.Tensor | None]:
    """The gradients of `ctx.weights`, then of `ctx.biases`; None if they are accumulated in `ctx.cache`.

    ctx: of fused linear layers. g: (..., O), of the output. x: (..., I), the input; None if parameters are not trained.
    """
    cache, weights, biases = ctx.cache, ctx.weights, ctx.biases
    if x is None:
        return [None] * (len(weights) + len(biases))
    g, x = g.flatten(0, -2), x.flatten(0, -2)
    bias_gradient = _column_sums(g).to(biases[0].dtype) if biases else None
    # torch has no GEMM on a CPU that accumulates 16 bits in float32
    if cache.accumulates_gradients and (g.is_cuda or g.dtype == weights[0].dtype):
        cache.accumulate_matmul(weights, g, x)
        if bias_gradient is not None:
            cache.accumulate(biases, bias_gradient)
        return [None] * (len(weights) + len(biases))
    sizes = [w.shape[0] for w in weights]
    gradients = list(torch.mm(g.t(), x).to(weights[0].dtype).split(sizes))
    return gradients + (list(bias_gradient.split(sizes)) if bias_gradient is not None else [])
