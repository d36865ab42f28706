"""Router replay and routing statistics of a `MegatronEngine`: what `verl.modeling.moe` does for the other engine.

megatron-core's routers ask their `router_replay` for the top k. A rank has the routers of its pipeline stage and, with
sequence parallelism, a share of the tokens.

L: layers with experts in the whole model, E: experts, k: experts per token, n: tokens of a rank in a micro-batch.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from verl.engines.megatron.layout import sparse_layers
from verl.engines.megatron.runtime import ParallelRanks
from verl.modeling.moe import NOT_RECORDED, check_choices, count, statistics_metrics
from verl.modeling.packing import ModelInput


class LayerRouting:
    """One router (megatron-core's `TopKRouter.router_replay`).

    In a layer that is recomputed, the choices of a micro-batch are kept until its backward pass. These come in the
    order of the forward passes.

    Args:
        stage: the settings of the pass.
        index: index of the layer among the L.
        scores_are_probabilities: whether the router takes the top k of probabilities, not of logits.
    """

    def __init__(self, stage: "StageRouting", index: int, scores_are_probabilities: bool):
        self.stage, self.index, self.scores_are_probabilities = stage, index, scores_are_probabilities
        self.start(None)
        self.waiting: deque[torch.Tensor | None] = deque()
        self.load: torch.Tensor | int = 0
        self.entropy: torch.Tensor | int = 0

    def start(self, recorded: torch.Tensor | None) -> None:
        """Start the forward pass of a micro-batch. recorded: (n, k) choices to replay or compare."""
        self.recorded = recorded
        self.used = self.computed = self.entropies = torch.empty(0)

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores (n, k) and choices (n, k). scores: (n, E)."""
        values, computed = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        is_recomputed = bool(self.waiting) and torch.is_grad_enabled()
        recorded = self.waiting.popleft() if is_recomputed else self.recorded
        if self.stage.trains and not torch.is_grad_enabled():
            self.waiting.append(recorded)
        experts = computed
        if recorded is not None and self.stage.replays:
            experts = torch.where(recorded == NOT_RECORDED, computed, recorded)
            values = scores.gather(1, experts)
        if not is_recomputed:
            self.used, self.computed = experts, computed
            if self.stage.counts:
                probabilities = scores.detach()
                probabilities = (
                    probabilities if self.scores_are_probabilities else probabilities.softmax(-1, torch.float32)
                )
                self.entropies = torch.special.entr(probabilities).sum(-1)
        return values, experts


class ChunkRouting:
    """The routers of one chunk of the model, and their choices: a list entry for each micro-batch.

    Attributes:
        records: choices (n, layers of the chunk, k) of the real tokens.
        differs: (n,) whether some router would have chosen other experts than the recorded ones.
        compared: (n,) tokens with recorded choices.
    """

    def __init__(self, stage: "StageRouting", layers: list[LayerRouting]):
        self.stage, self.layers = stage, layers
        self.clear()

    def clear(self) -> None:
        """Discard the results of the last pass."""
        self.records: list[torch.Tensor] = []
        self.differs: list[torch.Tensor] = []
        self.compared: list[torch.Tensor] = []
        for layer in self.layers:
            layer.waiting.clear()
            layer.load = layer.entropy = 0

    def start(self, model_input: ModelInput) -> None:
        """Start the forward pass of a micro-batch."""
        recorded = self._recorded(model_input)
        for layer in self.layers:
            layer.start(None if recorded is None else recorded[:, layer.index])

    def finish(self, model_input: ModelInput) -> None:
        """Add the choices of the routers."""
        stage, real = self.stage, len(self.stage.tokens_of(model_input))
        if stage.records:
            experts = [layer.used[:real].to(torch.int16) for layer in self.layers]
            self.records.append(torch.stack(experts, 1) if experts else torch.empty(real, 0, stage.top_k))
        if not stage.counts:
            return
        recorded = self._recorded(model_input)
        differs = torch.zeros(real, dtype=torch.bool, device=model_input.input_ids.device)
        for layer in self.layers:
            layer.load += count(layer.used[:real].flatten(), stage.experts)
            layer.entropy += layer.entropies[:real].sum()
            if recorded is not None:
                recorded_layer = recorded[:real, layer.index]
                differs |= (layer.computed[:real].sort(-1).values != recorded_layer.sort(-1).values).any(-1)
        is_recorded = (
            torch.zeros_like(differs) if recorded is None else (recorded[:real] != NOT_RECORDED).all(-1).all(-1)
        )
        self.differs.append(differs & is_recorded)
        self.compared.append(is_recorded)

    def _recorded(self, model_input: ModelInput) -> torch.Tensor | None:
        recorded = model_input.routed_experts
        return None if recorded is None else self.stage.share_of(recorded).long()


class StageRouting:
    """The routers of this rank."""

    def __init__(self, chunks: Sequence[Any], hf: Any, ranks: ParallelRanks):
        self.ranks = ranks
        numbers = [i for i, is_sparse in enumerate(sparse_layers(hf)) if is_sparse]
        self.layers, self.experts, self.top_k = len(numbers), hf.num_local_experts, hf.num_experts_per_tok
        # whether recorded choices are repeated or only compared, whether the pass has a backward pass, and whether the
        # choices are kept, for `recorded`, and statistics, for `metrics`
        self.replays, self.trains, self.records, self.counts = True, False, False, False
        self.chunks: list[ChunkRouting] = []
        for chunk in chunks:
            routers = []
            for layer in chunk.decoder.layers:
                if layer.layer_number - 1 in numbers:
                    index, router = numbers.index(layer.layer_number - 1), layer.mlp.router
                    router.router_replay = LayerRouting(self, index, router.config.moe_router_pre_softmax)
                    routers.append(router.router_replay)
            self.chunks.append(ChunkRouting(self, routers))
            chunk.routing = self.chunks[-1]

    def begin(
        self, recorded: torch.Tensor | None, *, trains: bool = False, records: bool = False, counts: bool = False
    ) -> None:
        """Start a pass over micro-batches.

        Args:
            recorded: the column routed_experts, if the batch has it.

        Raises:
            ValueError: the choices are not those of this model.
        """
        if recorded is not None:
            check_choices(tuple(recorded.shape[2:]), self.layers, self.top_k)
        self.trains, self.records, self.counts = trains, records, counts
        for chunk in self.chunks:
            chunk.clear()

    def share_of(self, values: torch.Tensor) -> torch.Tensor:
        """The tokens of a tensor-parallel rank, which divide those of a context-parallel one."""
        return values.chunk(self.ranks.t_size)[self.ranks.t]

    def tokens_of(self, model_input: ModelInput) -> torch.Tensor:
        """`ModelInput.tokens` of this rank: the real tokens, which come first."""
        share = model_input.input_ids.shape[1] // self.ranks.t_size
        return model_input.tokens[self.ranks.t * share : (self.ranks.t + 1) * share]

    def recorded(self, rows: Sequence[list[int]], inputs: Sequence[ModelInput]) -> torch.Tensor:
        """The column routed_experts (B, P + T, L, k) int16 of the last pass. Collective.

        Args:
            rows: rows of each micro-batch.
            inputs: its input on this rank.
        """
        width, shape = inputs[0].width, (self.layers, self.top_k)
        column = torch.full((sum(map(len, rows)), width, *shape), NOT_RECORDED, dtype=torch.int16)
        for i, model_input in enumerate(inputs):
            tokens = self.tokens_of(model_input)
            # shifted by one, so that the shares of the ranks can be summed
            shifted = torch.zeros(len(rows[i]) * width, *shape, dtype=torch.int32, device=tokens.device)
            for chunk in self.chunks:
                for position, layer in enumerate(chunk.layers):
                    shifted[tokens, layer.index] = chunk.records[i][:, position].int() - NOT_RECORDED
            self._sum(shifted)
            column[rows[i]] = (shifted + NOT_RECORDED).to("cpu", torch.int16).unflatten(0, (-1, width))
        return column

    def metrics(self, sum_over_ranks: Callable[[list[float]], list[float]]) -> dict[str, float]:
        """The metrics moe/* of the last pass, over all ranks. Collective."""
        differs, compared = torch.cat(self.chunks[0].differs), torch.cat(self.chunks[0].compared)
        for chunk in self.chunks[1:]:
            differs |= torch.cat(chunk.differs)
        load = torch.zeros(self.layers, self.experts, dtype=torch.float64, device=differs.device)
        counts = torch.zeros(4, dtype=torch.float64, device=differs.device)
        for layer in (layer for chunk in self.chunks for layer in chunk.layers):
            load[layer.index] += layer.load
            counts[0] += layer.entropy
        if self.ranks.p_size > 1:  # a token counts if the routers of any stage differ
            any_stage = differs.to(torch.uint8)
            dist.all_reduce(any_stage, dist.ReduceOp.MAX, self.ranks.groups.get_pipeline_model_parallel_group())
            differs = any_stage.bool()
        if self.ranks.p == 0:
            counts[1:] = torch.stack([torch.tensor(len(differs), device=counts.device), compared.sum(), differs.sum()])
        sums = torch.cat([load.flatten(), counts])
        self._sum(sums)
        return statistics_metrics(sum_over_ranks(sums.tolist()), self.layers)

    def _sum(self, values: torch.Tensor) -> None:
        """Sum over the ranks that compute the same rows, in place."""
        ranks, groups = self.ranks, self.ranks.groups
        for size, group in (
            (ranks.t_size, groups.get_tensor_model_parallel_group),
            (ranks.c_size, groups.get_context_parallel_group),
            (ranks.p_size, groups.get_pipeline_model_parallel_group),
        ):
            if size > 1:
                dist.all_reduce(values, group=group())
