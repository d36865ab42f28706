"""The mixture-of-experts layer: megatron-core's router, and the experts of the other engines.

megatron-core's token dispatchers sort, exchange and weigh the k copies of every token. Here the experts take tokens and
choices: expert-tensor-parallel ranks gather the tokens instead of their copies, and without expert parallelism nothing
else is exchanged.

n: tokens of a rank, E: experts, e: those of this rank, k: experts per token, H: hidden size, I: inner size of an
expert, sharded over the expert-tensor-parallel ranks.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from torch import nn
from torch.nn.functional import linear, silu

from verl.modeling.expert_parallel import ExpertRanks
from verl.modeling.fused_experts import fused_experts
from verl.modeling.linear import WeightCache


class Router(TopKRouter):
    """megatron-core's router, whose own matmul needs Transformer Engine."""

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        """Logits of the experts, in `moe_router_dtype`."""
        dtype = {"fp32": torch.float32, "fp64": torch.float64}.get(self.config.moe_router_dtype, input.dtype)
        return linear(input.to(dtype), self.weight.to(dtype))


class GroupedExperts(MegatronModule):
    """Gated experts in two tensors, as in transformers.

    Attributes:
        gate_up_proj: (e, 2 I, H), the rows of the gate first.
        down_proj: (e, H, I).
        inner_group: the expert-tensor-parallel ranks.
    """

    def __init__(self, num_local_experts: int, config: TransformerConfig, pg_collection: Any, **_: Any):
        super().__init__(config=config)
        inner, hidden = config.moe_ffn_hidden_size // pg_collection.expt_tp.size(), config.hidden_size
        self.num_experts, self.act_fn = config.num_moe_experts, silu
        self.gate_up_proj = nn.Parameter(torch.empty(num_local_experts, 2 * inner, hidden, dtype=config.params_dtype))
        self.down_proj = nn.Parameter(torch.empty(num_local_experts, hidden, inner, dtype=config.params_dtype))
        self.inner_group = pg_collection.expt_tp
        separate_groups = pg_collection.ep.size() > 1 or pg_collection.expt_tp.size() != pg_collection.tp.size()
        for parameter in self.parameters():
            parameter.allreduce = not separate_groups  # False: reduced over the expert-data-parallel ranks
        self._compute = partial(fused_experts, cache=WeightCache())
        if (size := pg_collection.ep.size()) > 1:
            self._compute = ExpertRanks(pg_collection.ep, size, gradient_scale=1.0, compute=self._compute)

    def forward(self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x (n, H), experts and weights (n, k) -> (n, H), partial over expert-tensor-parallel ranks."""
        return self._compute(self, x, experts, weights)


class MixtureOfExperts(MoELayer):
    """Router and experts (megatron-core's `mlp`)."""

    def __init__(self, config: TransformerConfig):
        super().__init__(config, MoESubmodules(experts=GroupedExperts, router=Router))
        self.token_dispatcher = None
        self._inner, tensor = self.experts.inner_group, self.attn_tp_group
        # tensor-parallel ranks have equally many tokens, data-parallel ones do not
        self._equal = set(dist.get_process_group_ranks(self._inner)) <= set(dist.get_process_group_ranks(tensor))

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        """(n, 1, H) -> (n, 1, H), and no bias."""
        if self.moe_layer_recompute and self.training:
            return tensor_parallel.checkpoint(self._compute, False, hidden_states), None
        return self._compute(hidden_states), None

    def _compute(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Route the tokens and compute their experts: (n, 1, H) -> (n, 1, H).

        With expert tensor parallelism, a rank has a slice of every expert: the tokens of all N ranks are gathered to
        (N, H), and each rank gets back the sum over the slices for its own n tokens.
        """
        probabilities, selected = self.router(hidden_states)  # both (n, E)
        experts = selected.byte().topk(self.config.moe_router_topk).indices  # (n, k)
        weights = probabilities.gather(1, experts)  # (n, k)
        x = hidden_states.flatten(0, 1)  # (n, H)
        if self._inner.size() == 1:
            return self.experts(x, experts, weights).view_as(hidden_states)
        sizes = None if self._equal else self._tokens_per_rank(len(x))
        x, experts, weights = (
            tensor_parallel.gather_from_sequence_parallel_region(
                values.contiguous(), group=self._inner, output_split_sizes=sizes
            )
            for values in (x, experts, weights)
        )
        output = tensor_parallel.reduce_scatter_to_sequence_parallel_region(
            self.experts(x, experts, weights), group=self._inner, input_split_sizes=sizes
        )
        return output.view_as(hidden_states)

    def _tokens_per_rank(self, tokens: int) -> list[int]:
        local = torch.tensor([tokens], device=self.router.weight.device)
        counts = torch.empty(self._inner.size(), dtype=local.dtype, device=local.device)
        dist.all_gather_into_tensor(counts, local, group=self._inner)
        return counts.tolist()
