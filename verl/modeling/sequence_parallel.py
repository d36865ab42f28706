"""Ulysses sequence parallelism: the tokens of packed sequences are sharded over the ranks of a group.

Every rank runs the layers on its share of the tokens. In attention, an all-to-all exchanges tokens for heads, so that
a rank has all tokens of some heads, and a second one exchanges them back (Jacobs et al. 2023, arXiv 2309.14509).

The outputs of all tokens are summed on every rank, and all ranks compute the same loss. The gradient that flows back
into a rank is that of the tokens of that rank, so the parameter gradients of the ranks add up to that of one device.
"""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist


class AllToAll(torch.autograd.Function):
    """Send sent[i] rows of x to rank i and receive received[i] rows from it; None: equal slices, in rank order."""

    @staticmethod
    def forward(
        ctx,
        x: torch.Tensor,
        group: dist.ProcessGroup,
        sent: list[int] | None = None,
        received: list[int] | None = None,
    ) -> torch.Tensor:
        ctx.group, ctx.sent, ctx.received = group, sent, received
        output = x.new_empty(len(x) if received is None else sum(received), *x.shape[1:])
        dist.all_to_all_single(output, x.contiguous(), received, sent, group=group)
        return output

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return AllToAll.apply(gradient, ctx.group, ctx.received, ctx.sent), None, None, None


class _SumOfShares(torch.autograd.Function):
    """The sum over the ranks; the backward pass is the identity, because every rank computes the same loss."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


def check_heads(heads: int, size: int) -> None:
    """Raise ValueError if `size` ranks do not divide the query heads."""
    if heads % size:
        raise ValueError(f"ulysses_sequence_parallel_size {size} does not divide the model's {heads} attention heads")


@dataclass(frozen=True)
class SequenceRanks:
    """The ranks that share the tokens of the same sequences.

    H query heads, K key/value heads, n tokens of one rank, N = size * n tokens of all, D head size.
    """

    group: dist.ProcessGroup  # their process group
    rank: int  # this rank in the group
    size: int  # number of ranks

    def sum_of_shares(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks of values that are 0 except at each rank's own tokens."""
        return _SumOfShares.apply(values, self.group)

    def tokens_to_heads(self, *states: torch.Tensor) -> list[torch.Tensor]:
        """Each (1, H, n, D) of this rank's tokens -> (1, H / size, N, D) of this rank's heads, in one all-to-all."""
        received = AllToAll.apply(torch.cat([x.reshape(self.size, -1) for x in states], 1), self.group)
        widths = [x.numel() // self.size for x in states]
        heads = []
        for x, chunk in zip(states, received.split(widths, 1)):
            _, h, n, d = x.shape
            by_rank = chunk.view(self.size, h // self.size, n, d)
            heads.append(by_rank.transpose(0, 1).reshape(1, h // self.size, self.size * n, d))
        return heads

    def heads_to_tokens(self, states: torch.Tensor) -> torch.Tensor:
        """(1, N, H / size, D) of this rank's heads -> (1, n, H, D) of this rank's tokens."""
        _, total, heads, d = states.shape
        by_rank = states.reshape(self.size, total // self.size, heads, d).contiguous()
        received = AllToAll.apply(by_rank, self.group)
        return received.transpose(0, 1).reshape(1, total // self.size, self.size * heads, d)

    def repeat_heads(self, key: torch.Tensor, heads: int) -> torch.Tensor:
        """Keys or values (1, K, n, D) with each head repeated until the ranks divide them.

        Args:
            key: the keys or values.
            heads: H; query head i still reads the same head.
        """
        check_heads(heads, self.size)
        return key.repeat_interleave(self.size // math.gcd(key.shape[1], self.size), 1)
