"""Products with a model's weights in the dtype to compute in, and the gradients of those weights.

Under autocast a float32 weight is cast once in every forward pass, and its gradient comes in 16 bits and is cast back
and added up once in every backward pass. Here, in a `Phase` in which the weights do not change, a weight is cast once,
and a product adds its gradient to `.grad` itself, in the dtype of the parameter, rounded nowhere in between. Linear
layers that read the same input are one product of their weights, one below the other.

N: tokens; I: inputs; O: outputs of all layers of a product.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn


class Phase:
    """A stretch of training or inference with a model whose weights do not change.

    Outside of one, layers compute as torch does.
    """

    def __init__(self) -> None:
        self.on = self._keeps = self.adds_gradients = False
        self._copies: dict[tuple[int, ...], torch.Tensor] = {}
        self._gradients: dict[tuple[int, ...], torch.Tensor] = {}

    @contextmanager
    def __call__(self, keep: bool, add_gradients: bool) -> Iterator[None]:
        """keep: a weight in the dtype to compute in is made once, not at every use; for weights that are all there.

        add_gradients: gradients go to `.grad` here and not through autograd, which must be None at the start; not
        where something else waits for them.
        """
        self.on, self._keeps, self.adds_gradients = True, keep, add_gradients
        try:
            yield
        finally:
            self.on = self._keeps = self.adds_gradients = False
            self._copies.clear()
            self._gradients.clear()

    def joint(self, parameters: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """The parameters (o_i, ...) as one tensor (O, ...) of a dtype."""
        if len(parameters) == 1 and parameters[0].dtype == dtype:
            return parameters[0].detach()
        key = tuple(map(id, parameters))
        if key in self._copies:
            return self._copies[key]
        rows = sum(p.shape[0] for p in parameters)
        made = parameters[0].new_empty((rows, *parameters[0].shape[1:]), dtype=dtype, requires_grad=False)
        for part, parameter in zip(made.split([p.shape[0] for p in parameters]), parameters):
            part.copy_(parameter.detach())
        if self._keeps:
            self._copies[key] = made
        return made

    def add_product(self, parameters: Sequence[nn.Parameter], g: torch.Tensor, x: torch.Tensor) -> None:
        """Add g^T x to the gradients of weights. g: (N, O). x: (N, I)."""
        old = self._gradient(parameters)
        if old is None:
            self._keep_gradient(parameters, _product(g.t(), x, parameters[0].dtype))
        elif old.dtype == x.dtype:
            old.addmm_(g.t(), x)
        else:
            torch.ops.aten.addmm.dtype_out(old, g.t(), x, old.dtype, out=old)

    def add(self, parameters: Sequence[nn.Parameter], gradient: torch.Tensor) -> None:
        """Add a gradient (O,) to those of biases."""
        old = self._gradient(parameters)
        if old is None:
            self._keep_gradient(parameters, gradient)
        else:
            old.add_(gradient)

    def _gradient(self, parameters: Sequence[nn.Parameter]) -> torch.Tensor | None:
        return parameters[0].grad if len(parameters) == 1 else self._gradients.get(tuple(map(id, parameters)))

    def _keep_gradient(self, parameters: Sequence[nn.Parameter], joint: torch.Tensor) -> None:
        """The parameters' gradients are views of the joint one, which products to come add to."""
        self._gradients[tuple(map(id, parameters))] = joint
        for part, parameter in zip(joint.split([p.shape[0] for p in parameters]), parameters):
            parameter.grad = part


def _product(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """a b in a dtype that is that of a and b, or float32."""
    return torch.mm(a, b) if dtype == a.dtype else torch.mm(a, b, out_dtype=dtype)


def _column_sums(x: torch.Tensor) -> torch.Tensor:
    """The sums over the rows of x (N, D), in float32 at least."""
    if not x.is_cuda or x.dtype == torch.float64:
        return x.sum(0, dtype=torch.promote_types(x.dtype, torch.float32))
    from verl.modeling.layers_triton import column_sums

    return column_sums(x)


class Embedding(torch.autograd.Function):
    """weight[ids]: ids (...), weight (V, D) -> (..., D). padding: an id that gets no gradient, or None.

    A gradient that is there already is added to where it is, not by way of a (V, D) tensor that is zero nearly
    everywhere. The order of its sums is always the same.
    """

    @staticmethod
    def forward(ctx, ids: torch.Tensor, weight: nn.Parameter, padding: int | None, phase: Phase) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.weight, ctx.padding, ctx.phase = weight, padding, phase
        return nn.functional.embedding(ids, weight)

    @staticmethod
    def backward(ctx, g: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (ids,) = ctx.saved_tensors
        weight, padding = ctx.weight, ctx.padding
        if not ctx.phase.adds_gradients or weight.grad is None:
            none = -1 if padding is None else padding
            return None, torch.ops.aten.embedding_dense_backward(g, ids, len(weight), none, False), None, None
        if padding is not None:
            g = g.masked_fill((ids == padding).unsqueeze(-1), 0)
        weight.grad.index_put_((ids.flatten(),), g.flatten(0, -2).to(weight.grad.dtype), accumulate=True)
        return None, None, None, None


class Product(torch.autograd.Function):
    """x W^T + b of some linear layers, (..., I) -> (..., O), in a dtype. parameters: their weights, then biases."""

    @staticmethod
    def forward(
        ctx, x: torch.Tensor, dtype: torch.dtype, phase: Phase, layers: int, *parameters: nn.Parameter
    ) -> torch.Tensor:
        weights, biases = parameters[:layers], parameters[layers:]
        ctx.phase, ctx.weights, ctx.biases, ctx.dtypes = phase, weights, biases, (x.dtype, dtype)
        x = x.to(dtype)
        ctx.save_for_backward(x if any(ctx.needs_input_grad[4:]) else None)
        bias = phase.joint(biases, dtype) if biases else None
        return nn.functional.linear(x, phase.joint(weights, dtype), bias)

    @staticmethod
    def backward(ctx, g: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        phase, weights, biases, (x_dtype, dtype) = ctx.phase, ctx.weights, ctx.biases, ctx.dtypes
        gx = torch.matmul(g, phase.joint(weights, dtype)).to(x_dtype) if ctx.needs_input_grad[0] else None
        found: list[torch.Tensor | None] = [None] * (len(weights) + len(biases))
        if x is None:
            return gx, None, None, None, *found
        g, x = g.flatten(0, -2), x.flatten(0, -2)
        of_biases = _column_sums(g).to(biases[0].dtype) if biases else None
        if phase.adds_gradients:
            phase.add_product(weights, g, x)
            if of_biases is not None:
                phase.add(biases, of_biases)
        else:
            sizes = [w.shape[0] for w in weights]
            found = list(torch.mm(g.t(), x).to(weights[0].dtype).split(sizes))
            found += of_biases.split(sizes) if of_biases is not None else []
        return gx, None, None, None, *found
