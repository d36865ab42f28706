"""Stop strings: text that ends a response."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

#: decode steps between searches for stop strings
SEARCH_INTERVAL = 8


@dataclass(frozen=True)
class StopStrings:
    """Ends a response with the token that completes one of `strings`.

    Args:
        strings: the stop strings.
        decode: the tokenizer's method, token ids -> text.

    Raises:
        ValueError: no strings, or an empty one.
    """

    strings: tuple[str, ...]
    decode: Callable[[list[int]], str]

    def __post_init__(self) -> None:
        if not self.strings or not all(self.strings):
            raise ValueError(f"stop: expected non-empty strings, found {list(self.strings)}")

    def find(self, token_ids: Sequence[int], start: int = 0) -> int | None:
        """Number of tokens to keep; None without a match. The first `start` tokens have already been searched."""
        # a token is at least one byte, so earlier ones cannot be part of a match; one more, since decoding may strip
        # the space of the first
        begin = max(0, start - max(len(text.encode()) for text in self.strings) - 1)
        if not self._contains_stop(token_ids[begin:]):
            return None
        ends = range(max(start, begin) + 1, len(token_ids))
        return next((end for end in ends if self._contains_stop(token_ids[begin:end])), len(token_ids))

    def _contains_stop(self, token_ids: Sequence[int]) -> bool:
        text = self.decode(list(token_ids))
        return any(string in text for string in self.strings)
