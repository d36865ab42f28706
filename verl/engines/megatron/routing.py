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
        index: of the layer among the L.
        of_probabilities: whether the top k are those of probabilities, or of logits.
    """

    def __init__(self, stage: "StageRouting", index: int, of_probabilities: bool):
        self.stage, self.index, self.of_probabilities = stage, index, of_probabilities
        self.start(None)
        self.waiting: deque[torch.Tensor | None] = deque()
        self.load: torch.Tensor | int = 0
        self.entropy: torch.Tensor | int = 0

    def start(self, given: torch.Tensor | None) -> None:
        """Begin the forward pass of a micro-batch. given: (n, k) recorded choices."""
        self.given = given
        self.chosen = self.own = self.entropies = torch.empty(0)

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores (n, k) and choices (n, k). scores: (n, E)."""
        values, own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        is_again = bool(self.waiting) and torch.is_grad_enabled()
        given = self.waiting.popleft() if is_again else self.given
        if self.stage.trains and not torch.is_grad_enabled():
            self.waiting.append(given)
        chosen = own
        if given is not None and self.stage.replays:
            chosen = torch.where(given == NOT_RECORDED, own, given)
            values = scores.gather(1, chosen)
        if not is_again:
            self.chosen, self.own = chosen, own
            if self.stage.counts:
                found = scores.detach()
                found = found if self.of_probabilities else found.softmax(-1, torch.float32)
                self.entropies = torch.special.entr(found).sum(-1)
        return values, chosen


class ChunkRouting:
    """The routers of one chunk of the model, and what they chose: a list entry for each micro-batch.

    Attributes:
        records: choices (n, layers of the chunk, k) of the real tokens.
        differs: (n,) whether some router would have chosen other experts than the recorded ones.
        compared: (n,) tokens with recorded choices.
    """

    def __init__(self, stage: "StageRouting", layers: list[LayerRouting]):
        self.stage, self.layers = stage, layers
        self.clear()

    def clear(self) -> None:
        """Forget the last pass."""
        self.records: list[torch.Tensor] = []
        self.differs: list[torch.Tensor] = []
        self.compared: list[torch.Tensor] = []
        for layer in self.layers:
            layer.waiting.clear()
            layer.load = layer.entropy = 0

    def start(self, model_input: ModelInput) -> None:
        """Begin the forward pass of a micro-batch."""
        given = self._given(model_input)
        for layer in self.layers:
            layer.start(None if given is None else given[:, layer.index])

    def finish(self, model_input: ModelInput) -> None:
        """Add what the routers chose."""
        stage, real = self.stage, len(self.stage.tokens_of(model_input))
        if stage.records:
            chosen = [layer.chosen[:real].to(torch.int16) for layer in self.layers]
            self.records.append(torch.stack(chosen, 1) if chosen else torch.empty(real, 0, stage.top_k))
        if not stage.counts:
            return
        given = self._given(model_input)
        differs = torch.zeros(real, dtype=torch.bool, device=model_input.input_ids.device)
        for layer in self.layers:
            layer.load += count(layer.chosen[:real].flatten(), stage.experts)
            layer.entropy += layer.entropies[:real].sum()
            if given is not None:
                wanted = given[:real, layer.index]
                differs |= (layer.own[:real].sort(-1).values != wanted.sort(-1).values).any(-1)
        recorded = torch.zeros_like(differs) if given is None else (given[:real] != NOT_RECORDED).all(-1).all(-1)
        self.differs.append(differs & recorded)
        self.compared.append(recorded)

    def _given(self, model_input: ModelInput) -> torch.Tensor | None:
        given = model_input.routed_experts
        return None if given is None else self.stage.share_of(given).long()


class StageRouting:
    """The routers of this rank.

    Args:
        chunks: of the model.
        hf: the HuggingFace config.
        ranks: the position of this rank.

    Attributes:
        replays: whether recorded choices are repeated; otherwise they are only compared.
        trains: whether the pass has a backward pass.
        records: whether the choices are kept, for `recorded`.
        counts: whether statistics are kept, for `metrics`.
    """

    def __init__(self, chunks: Sequence[Any], hf: Any, ranks: ParallelRanks):
        self.ranks = ranks
        numbers = [i for i, is_sparse in enumerate(sparse_layers(hf)) if is_sparse]
        self.layers, self.experts, self.top_k = len(numbers), hf.num_local_experts, hf.num_experts_per_tok
        self.replays, self.trains, self.records, self.counts = True, False, False, False
        self.chunks: list[ChunkRouting] = []
        for chunk in chunks:
            own = []
            for layer in chunk.decoder.layers:
                if layer.layer_number - 1 in numbers:
                    index, router = numbers.index(layer.layer_number - 1), layer.mlp.router
                    router.router_replay = LayerRouting(self, index, router.config.moe_router_pre_softmax)
                    own.append(router.router_replay)
            self.chunks.append(ChunkRouting(self, own))
            chunk.routing = self.chunks[-1]

    def begin(
        self, given: torch.Tensor | None, *, trains: bool = False, records: bool = False, counts: bool = False
    ) -> None:
        """Begin a pass over micro-batches. given: the column routed_experts, if the batch has it.

        Raises:
            ValueError: the choices are not those of this model.
        """
        if given is not None:
            check_choices(tuple(given.shape[2:]), self.layers, self.top_k)
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
            rows: of each micro-batch.
            inputs: its input on this rank.
        """
        width, shape = inputs[0].width, (self.layers, self.top_k)
        found = torch.full((sum(map(len, rows)), width, *shape), NOT_RECORDED, dtype=torch.int16)
        for i, model_input in enumerate(inputs):
            tokens = self.tokens_of(model_input)
            # shifted by one, so that the shares of the ranks can be summed
            every = torch.zeros(len(rows[i]) * width, *shape, dtype=torch.int32, device=tokens.device)
            for chunk in self.chunks:
                for at, layer in enumerate(chunk.layers):
                    every[tokens, layer.index] = chunk.records[i][:, at].int() - NOT_RECORDED
            self._sum(every)
            found[rows[i]] = (every + NOT_RECORDED).to("cpu", torch.int16).unflatten(0, (-1, width))
        return found

    def metrics(self, sum_over_ranks: Callable[[list[float]], list[float]]) -> dict[str, float]:
        """The metrics moe/* of the last pass, over all ranks. Collective."""
        differs, compared = torch.cat(self.chunks[0].differs), torch.cat(self.chunks[0].compared)
        for chunk in self.chunks[1:]:
            differs |= torch.cat(chunk.differs)
        load = torch.zeros(self.layers, self.experts, dtype=torch.float64, device=differs.device)
        rest = torch.zeros(4, dtype=torch.float64, device=differs.device)
        for layer in (layer for chunk in self.chunks for layer in chunk.layers):
            load[layer.index] += layer.load
            rest[0] += layer.entropy
        if self.ranks.p_size > 1:  # a token counts if the routers of any stage differ
            any_stage = differs.to(torch.uint8)
            dist.all_reduce(any_stage, dist.ReduceOp.MAX, self.ranks.groups.get_pipeline_model_parallel_group())
            differs = any_stage.bool()
        if self.ranks.p == 0:
            rest[1:] = torch.stack([torch.tensor(len(differs), device=rest.device), compared.sum(), differs.sum()])
        sums = torch.cat([load.flatten(), rest])
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
