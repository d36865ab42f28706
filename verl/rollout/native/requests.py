"""Rows: the checked requests of a batch, in admission order."""

from collections.abc import Sequence
from dataclasses import dataclass

from verl.rollout.checks import check_request
from verl.rollout.native.decoder import Decoder
from verl.rollout.native.vision import PromptImages
from verl.rollout.request import Request
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
        images: those of the prompt.
    """

    index: int
    prompt: list[int]
    sample_id: int
    limit: int
    seed: int = 0
    stop: StopStrings | None = None
    images: PromptImages | None = None

    @property
    def key(self) -> tuple[tuple[int, ...], int]:
        """Rows with equal keys are samples of one prompt."""
        return tuple(self.prompt), id(self.images and self.images.inputs)

    @property
    def rope_offset(self) -> int:
        """See `PromptImages.offset`."""
        return 0 if self.images is None else self.images.offset

    @property
    def reach(self) -> int:
        """Number of rotary positions up to the end of the response."""
        return len(self.prompt) + self.limit + max(0, self.rope_offset)

    @property
    def length(self) -> int:
        """Max tokens in the KV cache; the last token is never fed back."""
        return len(self.prompt) + self.limit - 1

    @classmethod
    def of(cls, index: int, request: Request, decoder: Decoder) -> "Row":
        """Check a request. Raises ValueError that names the request by `index`."""
        limits = decoder.vocab_size, decoder.max_positions, decoder.max_positions_reason
        vision = decoder.vision
        prompt = check_request(f"prompt {index}", request, "native", *limits, images=vision is not None)
        images = None if vision is None else vision.images_of(prompt, request)
        params = request.params
        return cls(index, prompt, request.sample_id, params.max_tokens, params.seed, params.stop, images)


def admission_order(rows: Sequence[Row]) -> list[Row]:
    """Sort rows by length, longest first, with the samples of a prompt adjacent."""
    longest: dict[tuple[tuple[int, ...], int], int] = {}
    for row in rows:
        longest[row.key] = max(row.length, longest.get(row.key, 0))
    return sorted(rows, key=lambda row: (-longest[row.key], row.key, -row.limit))
