"""Whether an update recomputes activations: `model.enable_gradient_checkpointing=auto` on a GPU.

The bytes of a token are measured in the first update (`engines.memory`), and compared with the free memory in each.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch

from verl.engines.base import Tensors
from verl.engines.megatron.model import TokenGPT
from verl.engines.megatron.runtime import ParallelRanks
from verl.engines.memory import free_bytes, logits_bytes, saved_bytes_per_token
from verl.engines.token_budget import WORKING_LAYERS, ActivationBytes, token_budget
from verl.modeling.packing import build_input
from verl.modeling.sequence_parallel import SequenceRanks

logger = logging.getLogger("verl.engines")


class AutoRecompute:
    """Recomputation of all layers, set for each update.

    Args:
        chunks: this rank's chunks of the model.
        ranks: its position.
        sequence_ranks: the context-parallel ranks, if there are several.
    """

    def __init__(self, chunks: list[TokenGPT], ranks: ParallelRanks, sequence_ranks: SequenceRanks | None):
        self.chunks, self.ranks, self._sequence_ranks = chunks, ranks, sequence_ranks
        self.config = chunks[0].config
        self.per_token: float | None = None
        self._logged: bool | None = None

    def choose(self, tokens: list[int], optimizer: Any, max_over_ranks: Callable[[list[float]], list[float]]) -> None:
        """Recompute activations in the next update if those of some rank do not fit. Collective; on GPUs.

        tokens: of each micro-batch of this rank.
        """
        device = next(self.chunks[0].parameters()).device
        free = free_bytes(device) - bytes_beside_activations(self.chunks, optimizer, device)
        is_needed = any(max_over_ranks([float(self.is_needed(max(tokens), len(tokens), free))]))
        self.set(is_needed)
        if self._logged != is_needed and self.ranks.is_first_rank:
            logger.info("activations are %s in an update", "recomputed" if is_needed else "kept")
        self._logged = is_needed

    def is_needed(self, tokens: int, micro_batches: int, free: int) -> bool:
        """Whether the activations of an update do not fit on this rank.

        Args:
            tokens: of its largest micro-batch.
            micro_batches: their number.
            free: bytes for activations.
        """
        if self.per_token is None:
            self.set(False)
            self.per_token = sum(map(self._saved_by, self.chunks))
        in_flight = self._in_flight()
        layers = sum(len(chunk.decoder.layers) for chunk in self.chunks)
        kept = self.per_token * (min(in_flight, micro_batches) + WORKING_LAYERS / layers)
        return token_budget(ActivationBytes(kept, kept), free).plain < tokens

    def _in_flight(self) -> float:
        """Micro-batches whose activations this stage keeps at the same time (1F1B).

        Interleaved stages run 2 (p_size - p - 1) + (v - 1) p_size chunks before the first backward pass.
        """
        p_size, p, v = self.ranks.p_size, self.ranks.p, len(self.chunks)
        return p_size - p if v == 1 else (2 * (p_size - p - 1) + (v - 1) * p_size + 1) / v

    def set(self, on: bool) -> None:
        """Recompute all layers from now on, or none."""
        config = self.config
        config.recompute_granularity = "full" if on else None
        config.recompute_method, config.recompute_num_layers = ("uniform", 1) if on else (None, None)

    def _saved_by(self, chunk: TokenGPT) -> float:
        return saved_bytes_per_token(lambda tokens: self.probe_forward(chunk, tokens), chunk.own_entries[1])

    def probe_forward(self, chunk: TokenGPT, tokens: int) -> torch.Tensor | Tensors:
        """The outputs of a chunk for one sequence, of which this rank has a number of tokens."""
        ids = torch.zeros(1, tokens * self.ranks.c_size, dtype=torch.long)
        columns = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "responses": ids[:, 1:]}
        columns["position_ids"] = torch.arange(ids.shape[1])[None]
        model_input = build_input(columns, remove_padding=True).padded_to(self.ranks.c_size * self.ranks.t_size)
        if self._sequence_ranks is not None:
            model_input = model_input.share_of(self._sequence_ranks)
        model_input = model_input.to(next(chunk.parameters()).device)
        if not chunk.pre_process:
            split = self.ranks.t_size if self.config.sequence_parallel else 1
            shape = model_input.input_ids.shape[1] // split, 1, self.config.hidden_size
            chunk.set_input_tensor(torch.zeros(shape, dtype=self.config.params_dtype, device=model_input.states.device))
        return chunk(model_input, ("values",) if chunk.kind != "causal_lm" else ("log_probs",), 1.0)


def bytes_beside_activations(chunks: list[TokenGPT], optimizer: Any, device: torch.device) -> int:
    """Bytes that an update needs on a GPU beside activations: the logits, and Adam's moments before the first step."""
    found = 0
    for one in optimizer.chained_optimizers:
        if not one.optimizer.state:
            shards = (p for group in one.optimizer.param_groups for p in group["params"])
            found += sum(2 * p.numel() * p.element_size() for p in shards)
    last = chunks[-1]
    if last.post_process and last.kind == "causal_lm":
        entries = last.vocab_size // last.tp_group.size()
        found += logits_bytes(entries, last.config.params_dtype.itemsize, device)
    return found
