"""Which chunk of a parameter a rank has: a box of rows and columns of the full parameter.

A parameter is read as a matrix: its first dimension is the rows, all others together are the columns. A parameter of
one dimension has one column.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Box(NamedTuple):
    """Rows [top, bottom) and columns [left, right) of a matrix."""

    top: int
    bottom: int
    left: int
    right: int

    @property
    def rows(self) -> int:
        return self.bottom - self.top

    @property
    def columns(self) -> int:
        return self.right - self.left

    @property
    def numel(self) -> int:
        return self.rows * self.columns

    def intersect(self, other: "Box") -> "Box | None":
        """The intersection; None if it is empty."""
        top, bottom = max(self.top, other.top), min(self.bottom, other.bottom)
        left, right = max(self.left, other.left), min(self.right, other.right)
        return Box(top, bottom, left, right) if top < bottom and left < right else None


@dataclass(frozen=True)
class Shard:
    """The chunk of a parameter that a training rank has.

    Attributes:
        name: HuggingFace name.
        shape: of the full parameter.
        box: the chunk; may be empty.
    """

    name: str
    shape: tuple[int, ...]
    box: Box


@dataclass(frozen=True)
class Chunk:
    """A box of a full parameter, and the row and column where it begins in the tensor that a rank stores."""

    box: Box
    row: int = 0
    column: int = 0


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """(rows, columns) of a parameter that is read as a matrix."""
    return (shape[0], math.prod(shape[1:])) if len(shape) else (1, 1)


def whole(shape: Sequence[int]) -> Box:
    """The box of a full parameter."""
    rows, columns = matrix_shape(shape)
    return Box(0, rows, 0, columns)
