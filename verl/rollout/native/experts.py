"""Routed experts of the native engine: a router, and the experts that this rank holds.

Under tensor parallelism a rank holds some of the experts of every layer; the ranks have the same tokens, compute the
outputs of their own experts, and sum them. N tokens, E experts, e of them on this rank, k per token, S = N k pairs.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from verl.modeling.moe import by_expert, fits_grouped_matmul, gate_weights, weighted_sum
from verl.rollout.native.decoder import Projection


@dataclass(frozen=True)
class Experts:
    """The experts of one layer."""

    router: Projection  # H -> E
    gate_up: torch.Tensor  # (e, 2 I, H)
    down: torch.Tensor  # (e, H, I)
    first: int  # number of the first expert on this rank
    top_k: int
    normalized: bool  # whether the weights of a token sum to 1
    keeps_float: bool  # whether the weights stay float32 in 16 bits

    @property
    def count(self) -> int:
        """Experts of the layer, on all ranks."""
        return self.router.matrix.shape[1]

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The experts of each token and their weights, (N, k) each. x: (N, H)."""
        logits = self.router(x)
        probabilities = logits.softmax(-1, dtype=torch.promote_types(torch.float32, logits.dtype))
        experts = probabilities.topk(self.top_k, -1).indices
        weights = gate_weights(probabilities, experts, self.normalized)
        return experts, weights if self.keeps_float else weights.to(logits.dtype)

    def outputs(
        self,
        x: torch.Tensor,
        experts: torch.Tensor,
        weights: torch.Tensor,
        activation: Callable[[torch.Tensor], torch.Tensor],
        static: bool = False,
    ) -> torch.Tensor:
        """The weighted sum of the experts of this rank: x (N, H) -> (N, H).

        Args:
            experts, weights: as `route` returns them.
            activation: of the gate.
            static: use operations whose shapes and number do not depend on the choices, for a CUDA graph.
        """
        ids = experts - self.first
        held = len(self.gate_up)
        if held < self.count:  # experts of other ranks come last
            ids = ids.where((ids >= 0) & (ids < held), held)
        if x.is_cuda and x.dtype == torch.bfloat16 and fits_grouped_matmul(self.gate_up, self.down, x.dtype):
            return self._grouped(x, ids, weights, activation)
        if static:
            return self._dense(x, ids, weights, activation)
        return self._one_by_one(x, ids, weights, activation)

    def _one_by_one(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, activation) -> torch.Tensor:
        """One matmul for every expert that has tokens."""
        order, counts = by_expert(ids, len(self.gate_up) + 1)
        tokens = order // self.top_k
        outputs = x.new_zeros(len(order), x.shape[1])
        rows, start = x[tokens], 0
        for expert, size in enumerate(counts[:-1].tolist()):
            if size:
                span = slice(start, start + size)
                gate, up = torch.mm(rows[span], self.gate_up[expert].t()).chunk(2, -1)
                torch.mm(activation(gate).mul_(up), self.down[expert].t(), out=outputs[span])
                start += size
        return weighted_sum(outputs, order, weights, x.dtype)

    def _grouped(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, activation) -> torch.Tensor:
        """One grouped matmul for all experts (bfloat16 on a GPU)."""
        held = len(self.gate_up)
        order, counts = by_expert(ids, held + 1)
        ends = counts[:-1].cumsum(0, dtype=torch.int32)
        gate, up = F.grouped_mm(x[order // self.top_k], self.gate_up.transpose(1, 2), offs=ends).chunk(2, -1)
        outputs = F.grouped_mm(activation(gate) * up, self.down.transpose(1, 2), offs=ends)
        if held < self.count:  # the kernel does not write the rows after the last expert
            outputs = outputs.masked_fill(ids.flatten()[order][:, None] == held, 0)
        return weighted_sum(outputs, order, weights, x.dtype)

    def _dense(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, activation) -> torch.Tensor:
        """Every expert for every token."""
        held = len(self.gate_up)
        gate, up = torch.matmul(x, self.gate_up.transpose(1, 2)).chunk(2, -1)  # (e, N, I)
        outputs = torch.matmul(activation(gate) * up, self.down.transpose(1, 2))  # (e, N, H)
        per_expert = weights.new_zeros(len(x), held + 1).scatter_add_(1, ids, weights)[:, :held]
        return (outputs * per_expert.t()[..., None]).sum(0).to(x.dtype)


def is_mixture(mlp: nn.Module) -> bool:
    """Whether the MLP of a layer consists of a router and experts."""
    return type(mlp).__name__ in ("Qwen3MoeSparseMoeBlock", "MixtralSparseMoeBlock")
