"""Memory of a `MegatronEngine`: offloading between phases, and recomputation of activations.

Weights, gradients and optimizer state may be in host memory between phases. megatron-core keeps views of its buffers,
so storages are emptied and filled again in place. With `model.enable_gradient_checkpointing=auto` on a GPU, the bytes
of a token are measured in the first update (`engines.memory`) and compared with the free memory in each.
"""

import logging
from collections.abc import Callable, Iterable
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


# ---- offloading ------------------------------------------------------------------------------------------------------


class Storages:
    """Storages that `move` brings to host memory and back, in turn.

    Args:
        tensors: returns the tensors; a storage that several share is moved once.
        keep: keep the values. False drops them: gradients are set to zero before they are used.
    """

    def __init__(self, tensors: Callable[[], Iterable[torch.Tensor]], keep: bool = True):
        self._tensors, self._keep = tensors, keep
        self._offloaded: list[tuple[torch.UntypedStorage, int, torch.UntypedStorage | None]] | None = None

    def move(self, _: torch.device) -> None:
        """Offload, or restore after an offload; called by `OnDevice`."""
        if self._offloaded is not None:
            for storage, size, host in self._offloaded:
                storage.resize_(size)
                if host is not None:
                    storage.copy_(host)
            self._offloaded = None
            return
        self._offloaded = []
        storages = {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in self._tensors())}
        for storage in storages.values():
            size, host = storage.nbytes(), None
            if self._keep:
                pinned = torch.empty(size, dtype=torch.uint8, pin_memory=storage.device.type == "cuda")
                host = pinned.untyped_storage()
                host.copy_(storage)
            storage.resize_(0)
            self._offloaded.append((storage, size, host))


def optimizer_tensors(optimizer: Any, weights: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Optimizer state and float32 weights, except tensors that share memory with the weights."""
    shared = {weight.untyped_storage()._cdata for weight in weights}
    tensors = []
    for part in optimizer.chained_optimizers:
        if part.optimizer is not None:
            tensors += [p for group in part.optimizer.param_groups for p in group["params"]]
            values = [value for state in part.optimizer.state.values() for value in state.values()]
            tensors += [value for value in values if isinstance(value, torch.Tensor) and value.dim()]
    return [tensor for tensor in tensors if tensor.untyped_storage()._cdata not in shared]


# ---- recomputation ---------------------------------------------------------------------------------------------------


class AutoRecompute:
    """Recomputation of all layers, set for each update."""

    def __init__(self, chunks: list[TokenGPT], ranks: ParallelRanks, sequence_ranks: SequenceRanks | None):
        self.chunks, self.ranks, self._sequence_ranks = chunks, ranks, sequence_ranks
        self.config = chunks[0].config
        self.per_token: float | None = None
        self._logged: bool | None = None

    def choose(self, tokens: list[int], optimizer: Any, max_over_ranks: Callable[[list[float]], list[float]]) -> None:
        """Recompute activations in the next update if those of some rank do not fit. Collective; on GPUs.

        tokens: of each micro-batch of this rank."""
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
            tokens: tokens of the largest micro-batch.
            micro_batches: their number.
            free: bytes for activations.
        """
        if self.per_token is None:
            self.set(False)
            self.per_token = sum(map(self._saved_by, self.chunks))
        in_flight = self._in_flight()
        layers = sum(len(chunk.decoder.layers) for chunk in self.chunks)
        bytes_per_token = self.per_token * (min(in_flight, micro_batches) + WORKING_LAYERS / layers)
        return token_budget(ActivationBytes(bytes_per_token, bytes_per_token), free).plain < tokens

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
        return saved_bytes_per_token(lambda tokens: self.probe_forward(chunk, tokens), chunk.local_entries[1])

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
    total = 0
    for part in optimizer.chained_optimizers:
        if not part.optimizer.state:
            shards = (p for group in part.optimizer.param_groups for p in group["params"])
            total += sum(2 * p.numel() * p.element_size() for p in shards)
    last = chunks[-1]
    if last.post_process and last.kind == "causal_lm":
        entries = last.vocab_size // last.tp_group.size()
        total += logits_bytes(entries, last.config.params_dtype.itemsize, device)
    return total
