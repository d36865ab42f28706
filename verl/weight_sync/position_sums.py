"""Checksums of chunks of a parameter that add up to those of the parameter, whatever the chunks are.

The words of row i are summed and multiplied by an odd factor of i; where rows have several words, those of column j as
well, by an even factor of j. i and j count in the full parameter, so the sums of disjoint boxes add up, modulo 2^64, to
the sum of the parameter. One call sums the rows of many parameters.

A changed word always changes the sum, because it counts by an odd factor in all. So does an exchange of two different
words of up to 4 bytes, in parameters of up to 1.05e9 words. Their positions differ by i rows and j columns, their
factors by 2 (i + g j) times an odd number, and g is chosen so that 2^32 does not divide i + g j there.

Words of 8 bytes have one limit: factors are odd, so their difference is even, and the top bit of a difference of words
is lost. An exchange of two words is missed if their difference is a multiple of 2^(63 - t), where 2^t is the largest
power of 2 that divides i + g j, and t is at most 31. So words that differ in their low 32 bits are always found. Words
that differ in nothing but their top bit (the sign of the last of four numbers in bfloat16) are always missed. For
random words at random positions the probability is about 2^-59. The same holds for exchanged rows, with the difference
of the sums of their words: rows with equal sums are missed. To find these exchanges, a second sum of the upper halves
of the words would be needed; on a CPU it doubles the time of the sums.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from verl.weight_sync.checksums import wrap

_ROW = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit number
#: g above: near 2^32 / golden ratio, whose small multiples are far from multiples of 2^32
COLUMN_STEP = 0x9E377311
_COLUMN = wrap(_ROW * COLUMN_STEP)
#: dtype of words of so many bytes
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def position_weights(top: int, left: int, counts_columns: bool) -> tuple[int, int, int]:
    """a, b, c: a word i rows below and j words right of position (top, left) of a parameter counts a + b i + c j."""
    row = (2 * top + 1) * _ROW
    if not counts_columns:
        return wrap(row), wrap(2 * _ROW), 0
    return wrap(row + (2 * left + 2) * _COLUMN), wrap(2 * _ROW), wrap(2 * _COLUMN)


class Summed(NamedTuple):
    """A matrix of words whose rows or columns are summed. size: number of sums."""

    source: int
    start: int
    rows: int
    columns: int
    word: int
    dim: int

    @property
    def size(self) -> int:
        return self.rows if self.dim == 1 else self.columns


@dataclass
class _Factors:
    """Ranges of positions, each with a cell that its sums are added to."""

    starts: list[int]
    sizes: list[int]
    cells: list[int]
    factors: list[int]


class PositionSums:
    """A fixed list of matrices to sum, and what each of their rows and columns counts for.

    Args:
        cells: number of results.
        device: of the tensors.
    """

    def __init__(self, cells: int, device: torch.device):
        self.cells = cells
        self.device = device
        self.matrices: list[Summed] = []
        self._ranges = _Factors([], [], [], [])
        self._cached: tuple[torch.Tensor, torch.Tensor] | None = None

    def add(self, matrix: Summed, ranges: Sequence[tuple[int, int, int]]) -> None:
        """Add a matrix.

        Args:
            matrix: what is summed; rows that follow those of the last matrix are summed with them.
            ranges: (position in the full parameter, number, cell) of its rows or columns, in order.
        """
        last = self.matrices[-1] if self.matrices else None
        joins = (
            last is not None
            and matrix.dim == last.dim == 1
            and (matrix.source, matrix.columns, matrix.word) == (last.source, last.columns, last.word)
            and matrix.start == last.start + last.rows * last.columns * last.word
        )
        if joins:
            self.matrices[-1] = last._replace(rows=last.rows + matrix.rows)
        else:
            self.matrices.append(matrix)
        for start, size, cell in ranges:
            self._ranges.starts.append(start)
            self._ranges.sizes.append(size)
            self._ranges.cells.append(cell)
            self._ranges.factors.append(_ROW if matrix.dim == 1 else _COLUMN)

    def _weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The factor of each sum, and its cell."""
        if self._cached is None:
            found = self._ranges
            sizes = torch.tensor(found.sizes, dtype=torch.int64)
            ends = sizes.cumsum(0)
            inside = torch.arange(int(sizes.sum())) - (ends - sizes).repeat_interleave(sizes)
            at = torch.tensor(found.starts, dtype=torch.int64).repeat_interleave(sizes) + inside
            factors = torch.tensor(found.factors, dtype=torch.int64).repeat_interleave(sizes)
            weights = (at * 2 + 1 + (factors == _COLUMN)) * factors
            cells = torch.tensor(found.cells, dtype=torch.int64).repeat_interleave(sizes)
            self._cached = weights.to(self.device), cells.to(self.device)
        return self._cached

    def of(self, sources: Sequence[torch.Tensor]) -> torch.Tensor:
        """The results: (cells,) int64, on the device.

        Args:
            sources: contiguous tensors that the matrices refer to by index.
        """
        total = torch.zeros(self.cells, dtype=torch.int64, device=self.device)
        if not self.matrices:
            return total
        weights, cells = self._weights()
        sums = torch.empty(len(weights), dtype=torch.int64, device=self.device)
        spans = sums.split([matrix.size for matrix in self.matrices])
        for matrix, out in zip(self.matrices, spans):
            words, columns = sources[matrix.source].view(WORDS[matrix.word]), matrix.columns
            at = words.storage_offset() + matrix.start // matrix.word
            content = words.as_strided((matrix.rows, columns), (columns, 1), at)
            torch.sum(content, matrix.dim, dtype=torch.int64, out=out)
        return total.index_add_(0, cells, sums.mul_(weights))
