"""The experts of a mixture-of-experts layer: all experts of a rank in two tensors, as in transformers.

Routing and the exchange of tokens are megatron-core's (`TopKRouter`, the all-to-all dispatcher).
"""

from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.router import TopKRouter
from torch import nn
from torch.nn.functional import grouped_mm, linear, silu

from verl.modeling.moe import fits_grouped_matmul


class Router(TopKRouter):
    """megatron-core's router, whose own matmul needs Transformer Engine."""

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        """Logits of the experts, in `moe_router_dtype`."""
        dtype = {"fp32": torch.float32, "fp64": torch.float64}.get(self.config.moe_router_dtype, input.dtype)
        return linear(input.to(dtype), self.weight.to(dtype))


class GroupedExperts(MegatronModule):
    """Gated experts over tokens sorted by expert (megatron-core's `experts`).

    E: experts of this rank; I: their inner size, sharded over the expert-tensor-parallel ranks; H: hidden size.

    Attributes:
        gate_up_proj: (E, 2 I, H), the rows of the gate first.
        down_proj: (E, H, I).
    """

    def __init__(self, num_local_experts: int, config: TransformerConfig, pg_collection: Any, **_: Any):
        super().__init__(config=config)
        inner, hidden = config.moe_ffn_hidden_size // pg_collection.expt_tp.size(), config.hidden_size
        self.gate_up_proj = nn.Parameter(torch.empty(num_local_experts, 2 * inner, hidden, dtype=config.params_dtype))
        self.down_proj = nn.Parameter(torch.empty(num_local_experts, hidden, inner, dtype=config.params_dtype))
        own_groups = pg_collection.ep.size() > 1 or pg_collection.expt_tp.size() != pg_collection.tp.size()
        for parameter in self.parameters():
            parameter.allreduce = not own_groups  # False: reduced over the expert-data-parallel ranks

    def forward(
        self, tokens: torch.Tensor, tokens_per_expert: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """tokens (n, H) sorted by expert, their weights (n,) -> (n, H), partial over expert-tensor-parallel ranks."""
        counts = tokens_per_expert.tolist()
        fits = fits_grouped_matmul(self.gate_up_proj, self.down_proj, tokens.dtype)
        multiply = _grouped if tokens.is_cuda and fits else _one_by_one
        gate, up = multiply(tokens, self.gate_up_proj, counts).chunk(2, -1)
        out = multiply(silu(gate) * up, self.down_proj, counts)
        return (out * probs[:, None]).to(out.dtype), None


def _grouped(x: torch.Tensor, weight: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """x (n, K) @ weight (E, N, K) of the expert of each row -> (n, N), in one kernel."""
    ends = torch.tensor(counts, device=x.device).cumsum(0, dtype=torch.int32)
    return grouped_mm(x, weight.transpose(1, 2), offs=ends)


def _one_by_one(x: torch.Tensor, weight: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """`_grouped` as one matmul per expert."""
    return torch.cat([linear(rows, matrix) for rows, matrix in zip(x.split(counts), weight)])
