"""Expert parallelism: every rank of a group holds some of the experts of each layer and computes its own tokens.

A token is sent to the ranks of its experts by an all-to-all and its outputs are sent back by another one (Lepikhin et
al. 2020, arXiv 2006.16668). No token is dropped. Gradients take the same way, so the gradient of an expert is the sum
over the tokens of all ranks.

N tokens of this rank, E experts, e = E / size of them on every rank, k per token, H hidden size.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from verl.modeling.linear import compute_dtype
from verl.modeling.moe import by_expert, expert_outputs, inverse, weighted_sum


class _AllToAll(torch.autograd.Function):
    """Send sent[i] rows of x to rank i and receive received[i] rows from it. The gradient takes the way back."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> torch.Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        found = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(found, x.contiguous(), received, sent, group=group)
        return found

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _AllToAll.apply(gradient, ctx.received, ctx.sent, ctx.group), None, None, None


@dataclass(frozen=True)
class ExpertRanks:
    """The ranks that share the experts of a model; see `moe.ExpertsFunction`.

    Attributes:
        group: their process group. Rank i of it holds the experts i e to (i + 1) e - 1.
        size: number of ranks.
        gradient_scale: factor on the gradients of the parameters.
    """

    group: dist.ProcessGroup
    size: int
    gradient_scale: float

    def __call__(self, module: nn.Module, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The weighted sum of the chosen experts: x (..., H), chosen and weights (..., k) -> (..., H)."""
        order, counts = by_expert(chosen, module.num_experts)
        incoming = torch.empty_like(counts)
        dist.all_to_all_single(incoming, counts, group=self.group)
        incoming = incoming.view(self.size, -1)  # (rank, e)
        both = torch.stack([counts.view(self.size, -1).sum(1), incoming.sum(1)]).tolist()
        sent, received = both
        rows = x.to(compute_dtype(x, module.gate_up_proj)).flatten(0, -2)[order // chosen.shape[-1]]
        rows = _AllToAll.apply(rows, sent, received, self.group)
        # received by rank and expert; the experts need them by expert
        held = incoming.shape[1]
        expert = torch.arange(held, device=x.device).repeat(self.size)
        sort = expert.repeat_interleave(incoming.flatten(), output_size=sum(received)).argsort(stable=True)
        outputs = expert_outputs(module, rows[sort], incoming.sum(0), self.gradient_scale)
        outputs = _AllToAll.apply(outputs[inverse(sort)], received, sent, self.group)
        return weighted_sum(outputs, order, weights, x.dtype)
