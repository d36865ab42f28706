"""Expert parallelism: every rank of a group holds some of the experts of each layer and computes its own tokens.

A token is sent to the ranks of its experts by an all-to-all and its outputs are sent back by another one (Lepikhin et
al. 2020, arXiv 2006.16668). No token is dropped. Gradients take the same way, so the gradient of an expert is the sum
over the tokens of all ranks.

N tokens of this rank, E experts, e = E / size of them on every rank, k per token, S = N k copies of tokens, H hidden
size.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from verl.modeling import layers_cpu
from verl.modeling.linear import compute_dtype, layer_functions
from verl.modeling.moe import ExpertsFunction, ScaledGradient, by_expert, inverse
from verl.modeling.sequence_parallel import AllToAll


class _Copies(torch.autograd.Function):
    """x[tokens]: x (N, H), tokens (S,). uses (N, k): where the copies of each token are."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, tokens: torch.Tensor, uses: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tokens, uses)
        return x[tokens]

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        tokens, uses = ctx.saved_tensors
        return _SumOfCopies.apply(gradient, tokens, uses), None, None


class _SumOfCopies(torch.autograd.Function):
    """The sum of the copies of each token: rows (S, H) -> (N, H); arguments as in `_Copies`."""

    @staticmethod
    def forward(ctx, rows: torch.Tensor, tokens: torch.Tensor, uses: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tokens, uses)
        # the kernel sums in float32
        functions = layers_cpu if rows.dtype == torch.float64 else layer_functions(rows)
        return functions.sum_of_uses(rows, uses)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        tokens, uses = ctx.saved_tensors
        return _Copies.apply(gradient, tokens, uses), None, None


@dataclass(frozen=True)
class ExpertRanks:
    """The ranks that share the experts of a model; see `moe.ExpertsFunction`."""

    group: dist.ProcessGroup  # their process group. Rank i of it holds the experts i e to (i + 1) e - 1.
    size: int  # number of ranks
    gradient_scale: float  # factor on the gradients of the parameters
    compute: ExpertsFunction  # computes the experts of this rank

    def __call__(
        self, module: nn.Module, x: torch.Tensor, selected: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """The weighted sum of the selected experts: x (..., H), selected and weights (..., k) -> (..., H)."""
        order, counts = by_expert(selected, module.num_experts)
        tokens, uses = order // selected.shape[-1], inverse(order).view(-1, selected.shape[-1])
        incoming = torch.empty_like(counts)
        dist.all_to_all_single(incoming, counts, group=self.group)
        incoming = incoming.view(self.size, -1)  # (rank, e)
        sent, received = torch.stack([counts.view(self.size, -1).sum(1), incoming.sum(1)]).tolist()
        rows = _Copies.apply(x.to(compute_dtype(x, module.gate_up_proj)).flatten(0, -2), tokens, uses)
        rows = AllToAll.apply(rows, self.group, sent, received)
        received_weights = AllToAll.apply(weights.flatten()[order], self.group, sent, received)
        # rows come by rank and expert; each is a token with one expert
        local_experts = incoming.shape[1]
        expert = torch.arange(local_experts, device=x.device).repeat(self.size)
        expert = expert.repeat_interleave(incoming.flatten(), output_size=sum(received))
        local = (p.to_local() if isinstance(p, DTensor) else p for p in (module.gate_up_proj, module.down_proj))
        gate_up, down = (p if self.gradient_scale == 1 else ScaledGradient.apply(p, self.gradient_scale) for p in local)
        experts = SimpleNamespace(gate_up_proj=gate_up, down_proj=down, num_experts=local_experts, act_fn=module.act_fn)
        outputs = self.compute(experts, rows, expert[:, None], received_weights[:, None])
        outputs = AllToAll.apply(outputs, self.group, received, sent)
        return _SumOfCopies.apply(outputs, tokens, uses).to(x.dtype).view_as(x)
