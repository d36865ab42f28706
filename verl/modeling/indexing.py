"""Scatter and gather of the rows of a tensor, with gradients that are plain copies.

The gradients of torch's own indexing accumulate, because indices may repeat. Here they are known to be distinct.
"""

import torch


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, index: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        ctx.save_for_backward(index)
        ctx.row = x.shape[1:]
        out = x.new_zeros(*shape, *ctx.row)  # returned itself: the output of a layer under FSDP2 must not be a view
        out.view(-1, *ctx.row).index_copy_(0, index, x)
        return out

    @staticmethod
    def backward(ctx, g: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (index,) = ctx.saved_tensors
        return g.reshape(-1, *ctx.row).index_select(0, index), None, None


class _Gather(torch.autograd.Function):
    """x (count, ...) -> (N, ...): the rows at `index` (N,), which are distinct."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(index)
        ctx.count = len(x)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx, g: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (index,) = ctx.saved_tensors
        return g.new_zeros(ctx.count, *g.shape[1:]).index_copy_(0, index, g), None


class _Repeat(torch.autograd.Function):
    """x (N, ...) -> (M, ...): row source[i] as row i. representative: (N,), for each row of x a row equal to it."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, source: torch.Tensor, representative: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(source, representative)
        return x.index_select(0, source)

    @staticmethod
    def backward(ctx, g: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        source, representative = ctx.saved_tensors
        duplicates = (representative[source] != torch.arange(len(source), device=source.device)).nonzero()[:, 0]
        gradient = g.index_select(0, representative).index_add_(0, source[duplicates], g.index_select(0, duplicates))
        return gradient, None, None


def scatter_rows(x: torch.Tensor, index: torch.Tensor, *shape: int) -> torch.Tensor:
    """x (N, ...) -> (*shape, ...): row i at index[i] of the flattened shape, 0 elsewhere. The indices are distinct."""
    return _Scatter.apply(x, index, shape)


gather_rows = _Gather.apply
repeat_rows = _Repeat.apply
