"""Batch-invariant generation with the trainer's forward pass: `rollout.deterministic` on a CPU.

By default, the native engine uses faster matmuls and kernels than training, which round differently. Here it only
manages the KV cache. `BatchInvariantForward` computes the model, with results for a token that do not depend on the
batch, so log-probs are bitwise equal to those of training.
"""

from collections.abc import Callable

import torch

from verl.modeling.batch_invariant.attention import Attend, Scores, attend_cached, attend_rows
from verl.modeling.batch_invariant.model import BatchInvariantForward
from verl.rollout.native.decoder import Decoder
from verl.rollout.native.kv_cache import BatchInvariantCache
from verl.rollout.native.torch_decoder import PREFILL_TOKENS
from verl.rollout.request import SamplingParams
from verl.rollout.sampling import choose


class BatchInvariantDecoder:
    """Like `torch_decoder.TorchDecoder`, but runs a `BatchInvariantForward`."""

    def __init__(self, decoder: Decoder, cache: BatchInvariantCache, forward: BatchInvariantForward):
        self.decoder = decoder
        self.cache = cache
        self.forward = forward
        self.records = False  # see `NativeRollout`
        self.table_length = decoder.max_positions  # the model has its own rotary tables
        self.start_step_at(torch.zeros(0, dtype=torch.int64))

    def prefill(self, prompts: list[list[int]], slots: list[list[int]]) -> torch.Tensor:
        """Prefill each prompt once, with keys and values for all its `slots`. Returns logits (len(prompts), V)."""
        return in_batches(self._prefill, prompts, slots)

    def _prefill(self, prompts: list[list[int]], slots: list[list[int]]) -> torch.Tensor:
        lengths = tuple(map(len, prompts))

        def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores):
            for targets, k, v in zip(slots, key.split(lengths), value.split(lengths)):
                self.cache.keys[layer][targets, :, : len(k)] = k.transpose(0, 1)
                self.cache.values[layer][targets, :, : len(v)] = v.transpose(0, 1)
            return attend_rows(query, key, value, lengths, scores)

        return self.forward.logits(prompt_states(self.forward, prompts, attend, torch.device("cpu")))

    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Move the rows of the slots `sources` (n,) to the slots `targets` (n,), which are others."""
        self.cache.move(sources, targets)

    def start_step_at(self, positions: torch.Tensor) -> None:
        """Set the positions (B,) of rows 0 .. B - 1 for the next `step`; each step advances them by one."""
        self.positions = positions.clone()
        self.seen = int(positions.max()) + 1 if len(positions) else 0

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Decode one step. tokens: (B,) of rows 0 .. B - 1. Returns logits (B, V)."""
        rows, positions = torch.arange(len(tokens)), self.positions

        def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores):
            keys, values = self.cache.keys[layer], self.cache.values[layer]
            keys[rows, :, positions], values[rows, :, positions] = key, value
            seen = slice(len(tokens)), slice(None), slice(self.seen)
            return attend_cached(query, keys[seen], values[seen], positions, scores)

        logits = self.forward.logits(self.forward.states(tokens, positions, attend))
        self.positions, self.seen = positions + 1, self.seen + 1
        return logits

    def choose(
        self, logits: torch.Tensor, params: SamplingParams, uniforms: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `sampling.choose`; with the log-probs of training."""
        tokens, log_probs = choose(logits, params, uniforms)
        if params.filters:  # training computes the unfiltered distribution only
            return tokens, log_probs
        return tokens, self.forward.log_probs(logits, tokens, 1.0 if params.greedy else params.temperature)


def in_batches(
    prefill: Callable[[list[list[int]], list[list[int]]], torch.Tensor],
    prompts: list[list[int]],
    targets: list[list[int]],
) -> torch.Tensor:
    """Prefill prompts in batches of up to PREFILL_TOKENS; a longer one is a batch. targets: slots or blocks of each."""
    logits, start, tokens = [], 0, 0
    for i, prompt in enumerate(prompts):
        if i > start and tokens + len(prompt) > PREFILL_TOKENS:
            logits.append(prefill(prompts[start:i], targets[start:i]))
            start, tokens = i, 0
        tokens += len(prompt)
    return torch.cat([*logits, prefill(prompts[start:], targets[start:])])


def prompt_states(
    forward: BatchInvariantForward, prompts: list[list[int]], attend: Attend, device: torch.device
) -> torch.Tensor:
    """Hidden state of the last token of each prompt, (len(prompts), H), from one forward pass over packed prompts."""
    ids = torch.tensor([token for prompt in prompts for token in prompt], device=device)
    positions = torch.tensor([at for prompt in prompts for at in range(len(prompt))], device=device)
    ends = torch.tensor([len(prompt) for prompt in prompts], device=device).cumsum(0) - 1
    return forward.states(ids, positions, attend)[ends]
