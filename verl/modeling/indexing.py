"""Rows of a tensor to places of a larger one and back, with gradients that are copies.

The gradients of torch's own indexing add up row by row, in case places are not distinct; here it is known which are.
"""

import torch


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, places: torch.Tensor, count: int) -> torch.Tensor:
        ctx.save_for_backward(places)
        return x.new_zeros(count, *x.shape[1:]).index_copy_(0, places, x)

    @staticmethod
    def backward(ctx, g: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        return g.index_select(0, places), None, None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(places)
        ctx.count = len(x)
        return x.index_select(0, places)

    @staticmethod
    def backward(ctx, g: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        return g.new_zeros(ctx.count, *g.shape[1:]).index_copy_(0, places, g), None


class _Repeat(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, source: torch.Tensor, one_use: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(source, one_use)
        return x.index_select(0, source)

    @staticmethod
    def backward(ctx, g: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        source, one_use = ctx.saved_tensors
        further = (one_use[source] != torch.arange(len(source), device=source.device)).nonzero()[:, 0]
        found = g.index_select(0, one_use).index_add_(0, source[further], g.index_select(0, further))
        return found, None, None


def spread_rows(x: torch.Tensor, places: torch.Tensor, count: int) -> torch.Tensor:
    """x (N, ...) -> (count, ...): row i at places[i], which are distinct; 0 elsewhere."""
    return _Spread.apply(x, places, count)


def collect_rows(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """x (count, ...) -> (N, ...): the rows at `places` (N,), which are distinct."""
    return _Collect.apply(x, places)


def repeat_rows(x: torch.Tensor, source: torch.Tensor, one_use: torch.Tensor) -> torch.Tensor:
    """x (N, ...) -> (M, ...): row source[i] as row i. one_use: (N,) one row that each row of x becomes."""
    return _Repeat.apply(x, source, one_use)
