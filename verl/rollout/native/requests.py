"""The rows of a generate call: checked, and in the order of their work."""

from collections.abc import Sequence
from dataclasses import dataclass

from verl.rollout.base import SamplingParams
from verl.rollout.native.model import Decoder


@dataclass(frozen=True)
class Row:
    """A row to generate: its place among the prompts, its prompt, its sample id, its response tokens at most."""

    index: int
    prompt: list[int]
    sample_id: int
    limit: int

    @property
    def length(self) -> int:
        """Columns of the cache it can need: the last token is never fed back."""
        return len(self.prompt) + self.limit - 1


def plan_rows(
    prompts: Sequence[list[int]],
    params: SamplingParams,
    sample_ids: Sequence[int] | None,
    limits: Sequence[int] | None,
    decoder: Decoder,
) -> list[Row]:
    """The rows in the order of their work: samples of one prompt side by side, longest first. Raises ValueError."""
    for name, values in (("sample_ids", sample_ids), ("limits", limits)):
        if values is not None and len(values) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts need as many {name}, found {len(values)}")
    sample_ids = range(len(prompts)) if sample_ids is None else sample_ids
    limits = [params.max_tokens] * len(prompts) if limits is None else limits
    rows = [Row(i, list(p), int(s), int(t)) for i, (p, s, t) in enumerate(zip(prompts, sample_ids, limits))]
    for row in rows:
        if not row.prompt:
            raise ValueError(f"prompt {row.index} has no tokens")
        if min(row.prompt) < 0 or max(row.prompt) >= decoder.vocab_size:
            raise ValueError(f"prompt {row.index} has a token outside the vocabulary of {decoder.vocab_size}")
        if not 1 <= row.limit <= params.max_tokens:
            raise ValueError(
                f"limit of row {row.index}: expected 1 to max_tokens={params.max_tokens}, found {row.limit}"
            )
        if len(row.prompt) + row.limit > decoder.max_positions:
            raise ValueError(
                f"row {row.index}: a prompt of {len(row.prompt)} and a response of {row.limit} tokens exceed "
                f"{decoder.max_positions} positions ({decoder.max_positions_reason}); shorten the prompt or the "
                "response"
            )
    longest: dict[tuple[int, ...], int] = {}
    for row in rows:
        prompt = tuple(row.prompt)
        longest[prompt] = max(row.length, longest.get(prompt, 0))
    return sorted(rows, key=lambda row: (-longest[tuple(row.prompt)], row.prompt, -row.limit))
