"""Which chunk of a parameter a rank has: a box of rows and columns of the full parameter.

A parameter is read as a matrix. One dimension: one column. Three or more, such as the experts of a layer: the first two
are the rows, all others together are the columns.
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
    rows = 2 if len(shape) > 2 else 1
    return math.prod(shape[:rows]), math.prod(shape[rows:])


def boxes_of(shape: Sequence[int], offset: Sequence[int], size: Sequence[int]) -> list[Box]:
    """The block of `size` at `offset` of a parameter, as boxes of the matrix that the parameter is read as. Dimensions
    after the third are in the block in full."""
    if len(shape) < 3:
        (top, left), (rows, columns) = (*offset, 0, 0)[:2], (*size, 1, 1)[:2]
        return [Box(top, top + rows, left, left + columns)]
    width, inner = math.prod(shape[3:]), shape[1]
    left, right = offset[2] * width, (offset[2] + size[2]) * width
    if size[1] == inner:
        return [Box(offset[0] * inner, (offset[0] + size[0]) * inner, left, right)]
    tops = [i * inner + offset[1] for i in range(offset[0], offset[0] + size[0])]
    return [Box(top, top + size[1], left, right) for top in tops]


def whole(shape: Sequence[int]) -> Box:
    """The box of a full parameter."""
    rows, columns = matrix_shape(shape)
    return Box(0, rows, 0, columns)
