"""What every kind of checkpoint gives to the merger: whole tensors, one at a time, by name."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

Shape = tuple[int, ...]


@dataclass(frozen=True)
class TensorInfo:
    """Shape and dtype of a whole tensor."""

    shape: Shape
    dtype: torch.dtype

    def meta(self) -> torch.Tensor:
        """A tensor of this kind without contents."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


class WeightSource(ABC):
    """The weights of a model, however they are spread over files.

    Only what is asked for is read, so that the memory in use is that of the tensors in hand and not of the model.
    """

    #: whether `read` and `read_again` agree in every bit: they copy, and do not calculate
    exact = True

    @abstractmethod
    def names(self) -> list[str]:
        """The names of all tensors, parameters and buffers."""

    @abstractmethod
    def infos(self, expected: Mapping[str, Shape]) -> dict[str, TensorInfo]:
        """Shape and dtype of every whole tensor.

        expected: the shapes in the model, read only where the files do not say the whole shape of a piece.
        Raises ValueError for pieces that do not make a whole tensor.
        """

    @abstractmethod
    def read(self, name: str) -> torch.Tensor:
        """The whole tensor. Raises ValueError that names the tensor and the file when it cannot be had."""

    @abstractmethod
    def read_again(self, name: str) -> torch.Tensor:
        """The whole tensor, put together by other code than `read`'s: what a merged model is verified against."""


def place(name: str, info: TensorInfo, blocks: Iterable[tuple[str, Shape, torch.Tensor]]) -> torch.Tensor:
    """Copy blocks to their places in one tensor.

    blocks: (where it comes from, offset in the whole, contents). Blocks at one offset are copies, as in hybrid
    sharding, and must agree in every bit. Raises ValueError when they do not, or when the blocks leave a gap.
    """
    whole = torch.empty(info.shape, dtype=info.dtype)
    filled: dict[Shape, str] = {}
    count = 0
    for origin, offset, block in blocks:
        if block.numel() == 0:  # fewer rows than ranks: the last ranks hold none
            continue
        region = whole[tuple(slice(start, start + size) for start, size in zip(offset, block.shape))]
        if region.shape != block.shape:
            raise ValueError(f"{origin}: its piece of {name} at {offset} does not fit into the shape {info.shape}")
        if offset not in filled:
            filled[offset] = origin
            count += block.numel()
            region.copy_(block)
        elif not same_bits(region, block):
            raise ValueError(
                f"{name} differs between {filled[offset]} and {origin}, which should hold copies of each other: "
                "they are not of one step, or one of them is damaged"
            )
    if count != whole.numel():
        raise ValueError(f"{name}: the pieces have {count} elements, expected are {whole.numel()} ({info.shape})")
    return whole


def join(blocks: list[tuple[Shape, torch.Tensor]], dim: int = 0) -> torch.Tensor:
    """Concatenate blocks in the order of their offsets, dimension by dimension; of copies the first counts."""
    if len(blocks) == 1 or dim == len(blocks[0][0]):
        return blocks[0][1]
    starts = sorted({offset[dim] for offset, _ in blocks})
    return torch.cat([join([b for b in blocks if b[0][dim] == start], dim + 1) for start in starts], dim)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equality of contents, by which NaN equals itself."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)))
