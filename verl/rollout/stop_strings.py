"""Stop strings: text that ends a response."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

#: decode steps between two searches for stop strings
SEARCH_INTERVAL = 8


@dataclass(frozen=True)
class StopStrings:
    """The token that completes one of `strings` in the text of a response is its last.

    Args:
        strings: the stop strings.
        decode: token ids -> text, a tokenizer's method.

    Raises:
        ValueError: no strings, or an empty one.
    """

    strings: tuple[str, ...]
    decode: Callable[[list[int]], str]

    def __post_init__(self) -> None:
        if not self.strings or not all(self.strings):
            raise ValueError(f"stop: expected texts of at least one character, found {list(self.strings)}")

    def find(self, token_ids: Sequence[int], start: int = 0) -> int | None:
        """How many tokens the response keeps; None where it has not ended. The first `start` were searched before."""
        # a token is at least a byte, so older ones are not part of a match; one more, since the first loses its space
        begin = max(0, start - max(len(text.encode()) for text in self.strings) - 1)
        if not self._contains_stop(token_ids[begin:]):
            return None
        ends = range(max(start, begin) + 1, len(token_ids))
        return next((end for end in ends if self._contains_stop(token_ids[begin:end])), len(token_ids))

    def _contains_stop(self, token_ids: Sequence[int]) -> bool:
        text = self.decode(list(token_ids))
        return any(string in text for string in self.strings)
