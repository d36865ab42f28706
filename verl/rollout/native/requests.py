"""Rows: the checked requests of a batch, in admission order."""

from collections.abc import Sequence
from dataclasses import dataclass

from verl.rollout.base import Request
from verl.rollout.checks import check_request
from verl.rollout.native.decoder import Decoder
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
        limits = decoder.vocab_size, decoder.max_positions, decoder.max_positions_reason
        prompt, params = check_request(f"prompt {index}", request, "native", *limits), request.params
        return cls(index, prompt, request.sample_id, params.max_tokens, params.seed, params.stop)


def admission_order(rows: Sequence[Row]) -> list[Row]:
    """Sort rows by length, longest first, with the samples of a prompt adjacent."""
    longest: dict[tuple[int, ...], int] = {}
    for row in rows:
        prompt = tuple(row.prompt)
        longest[prompt] = max(row.length, longest.get(prompt, 0))
    return sorted(rows, key=lambda row: (-longest[tuple(row.prompt)], row.prompt, -row.limit))
