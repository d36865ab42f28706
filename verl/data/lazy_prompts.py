"""Token ids of the prompts of a streamed dataset: computed when they are read."""

from collections.abc import Callable, Sequence

from verl.data.files import Rows

_FIRST = 1024  # rows at the start of the data that are checked before training
_SPREAD = 1024  # further rows, spread evenly over the data


class LazyPrompts:
    """The interface of `TokenTable` without the tokens: lengths and largest id are of the rows that were checked.

    Args:
        rows: the rows.
        ids_of: (rows, item) -> token ids.
        limit: maximum length of a prompt.

    Attributes:
        checked: number of prompts that were appended.
        longest: upper bound of the length of a prompt.
        largest: the largest token id of the checked prompts.
    """

    def __init__(self, rows: Rows, ids_of: Callable[[Rows, int], list[int]], limit: int):
        self.rows, self._ids_of = rows, ids_of
        self.checked, self.largest, self.longest = 0, 0, limit

    def append(self, ids: Sequence[int]) -> None:
        self.checked += 1
        self.largest = max(self.largest, max(ids))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, item: int) -> list[int]:
        return self._ids_of(self.rows, item)

    @staticmethod
    def sample(count: int) -> list[int]:
        """The rows of a dataset of `count` that are checked before training."""
        return sorted({*range(min(_FIRST, count)), *range(0, count, max(count // _SPREAD, 1))})
