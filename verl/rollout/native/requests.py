"""Rows: the checked requests of a batch, in admission order."""

from collections.abc import Sequence
from dataclasses import dataclass

from verl.rollout.base import Request, SamplingParams
from verl.rollout.native.model import Decoder
from verl.rollout.stop_strings import StopStrings


@dataclass(frozen=True, eq=False)
class Row:
    """One request of a batch.

    Args:
        index: index of the request.
        prompt: token ids.
        sample_id, seed: determine its random numbers.
        limit: max response tokens.
        stop: stop strings.
    """

    index: int
    prompt: list[int]
    sample_id: int
    limit: int
    seed: int = 0
    stop: StopStrings | None = None

    @property
    def length(self) -> int:
        """Max tokens in the KV cache; the last token is never fed back."""
        return len(self.prompt) + self.limit - 1

    @classmethod
    def of(cls, index: int, request: Request, decoder: Decoder) -> "Row":
        """Check a request. Raises ValueError that names the request by `index`."""
        prompt, limit = request.prompt_ids, request.params.max_tokens
        if request.multi_modal_data is not None:
            raise ValueError(f"prompt {index}: rollout.name=native does not support multi_modal_data (text only)")
        if not prompt:
            raise ValueError(f"prompt {index} has no tokens")
        if min(prompt) < 0 or max(prompt) >= decoder.vocab_size:
            raise ValueError(f"prompt {index} has a token outside the vocabulary of {decoder.vocab_size}")
        if len(prompt) + limit > decoder.max_positions:
            raise ValueError(
                f"prompt {index}: {len(prompt)} prompt and {limit} response tokens exceed {decoder.max_positions} "
                f"positions ({decoder.max_positions_reason}); shorten the prompt or the response"
            )
        return cls(index, list(prompt), request.sample_id, limit, request.params.seed, request.params.stop)


def admission_order(rows: Sequence[Row]) -> list[Row]:
    """Sort rows by length, longest first, with the samples of a prompt adjacent."""
    longest: dict[tuple[int, ...], int] = {}
    for row in rows:
        prompt = tuple(row.prompt)
        longest[prompt] = max(row.length, longest.get(prompt, 0))
    return sorted(rows, key=lambda row: (-longest[tuple(row.prompt)], row.prompt, -row.limit))


def batches_of(requests: Sequence[Request]) -> list[tuple[SamplingParams, list[int]]]:
    """Group requests that can share a batch: (shared parameters, indices), in order of first appearance.

    max_tokens, seed and stop may differ within a batch.
    """
    shared: dict[int, SamplingParams] = {}  # most requests have the same parameters object
    batches: dict[SamplingParams, list[int]] = {}
    for index, request in enumerate(requests):
        params = shared.get(id(request.params))
        if params is None:
            params = shared[id(request.params)] = request.params.shared
        batches.setdefault(params, []).append(index)
    return list(batches.items())
