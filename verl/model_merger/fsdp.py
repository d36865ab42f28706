"""Checkpoints of one file per rank: `model_world_size_W_rank_R.pt`, as verl's FSDP workers write them.

actor/
  model_world_size_2_rank_0.pt   the share of rank 0: DTensors (FSDP2, FSDP1 with a device mesh), ShardedTensors
  model_world_size_2_rank_1.pt   (FSDP1 without one) or plain tensors (one rank; buffers, which every rank holds whole)
  optim_..., extra_state_...     not read
  fsdp_config.json               {"FSDP_version": 2, "world_size": 2}
  huggingface/                   config and tokenizer
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from verl.model_merger.shard_pickle import DTensorPiece, ShardedTensorPiece, read_rank_file
from verl.model_merger.source import Shape, TensorInfo, WeightSource, join, place

_FILE = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")

#: what wrappers put into parameter names
_WRAPPERS = re.compile(r"(?:_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod)\.")

Block = tuple[str, Shape, torch.Tensor]  # file name, offset in the whole, contents


def is_rank_file(path: Path) -> bool:
    """Whether the name is that of a rank's weights."""
    return _FILE.fullmatch(path.name) is not None


def rank_files(folder: Path) -> list[Path]:
    """The files of ranks 0 ... W-1. Raises ValueError that names the missing ones, or the world sizes that disagree."""
    found = {(int(m[1]), int(m[2])): path for path in folder.iterdir() if (m := _FILE.fullmatch(path.name))}
    sizes = sorted({world for world, _ in found})
    if len(sizes) != 1:
        raise ValueError(
            f"{folder} holds files of runs with {' and '.join(map(str, sizes))} ranks: expected those of one; "
            "move the others away"
        )
    world = sizes[0]
    stated = folder / "fsdp_config.json"
    if stated.is_file() and (config := json.loads(stated.read_text()))["world_size"] != world:
        raise ValueError(f"{stated} says world_size {config['world_size']}, but the files are those of {world} ranks")
    expected = {(world, rank): f"model_world_size_{world}_rank_{rank}.pt" for rank in range(world)}
    missing = [name for key, name in expected.items() if key not in found]
    if missing:
        raise ValueError(
            f"{folder} lacks {', '.join(missing)}: {len(found)} of {world} rank files are here. "
            "With several nodes each may have written to its own disk: copy all files into one folder"
        )
    return [found[key] for key in expected]


class RankFiles(WeightSource):
    """The weights of all ranks; memory-mapped, so that only what is read takes memory."""

    def __init__(self, folder: Path):
        self.files = rank_files(folder)
        pieces = [read_rank_file(path) for path in self.files]
        for path, held in zip(self.files, pieces):
            if held.keys() != pieces[0].keys():
                differing = sorted(held.keys() ^ pieces[0].keys())
                raise ValueError(
                    f"{path.name} and {self.files[0].name} hold different tensors, for instance {differing[:3]}: "
                    "they are not of one checkpoint"
                )
        origins = [path.name for path in self.files]
        self._tensors = {
            _WRAPPERS.sub("", name): _assembly(name, origins, [held[name] for held in pieces]) for name in pieces[0]
        }

    def names(self) -> list[str]:
        return list(self._tensors)

    def infos(self, expected: Mapping[str, Shape]) -> dict[str, TensorInfo]:
        return {name: tensor.info(expected.get(name)) for name, tensor in self._tensors.items()}

    def read(self, name: str) -> torch.Tensor:
        tensor = self._tensors[name]
        return place(name, tensor.info(), tensor.blocks())

    def read_again(self, name: str) -> torch.Tensor:
        return self._tensors[name].joined()


# ---- one tensor over all ranks --------------------------------------------------------------------------------------


class _Assembly(ABC):
    """The pieces of one tensor, those of rank 0 first."""

    def __init__(self, name: str, origins: list[str], pieces: list):
        self.name, self.origins, self.pieces = name, origins, pieces

    @abstractmethod
    def info(self, expected: Shape | None = None) -> TensorInfo:
        """Of the whole tensor; `expected` is its shape in the model, where that is known."""

    @abstractmethod
    def blocks(self) -> Iterator[Block]:
        """Every piece with its place in the whole."""

    @abstractmethod
    def joined(self) -> torch.Tensor:
        """The whole by concatenation, without reckoning places."""


class _DTensors(_Assembly):
    def info(self, expected: Shape | None = None) -> TensorInfo:
        piece: DTensorPiece = self.pieces[0]
        return TensorInfo(piece.shape, piece.local.dtype)

    def _mesh_shape(self) -> Shape:
        return tuple(1 + max(axis) for axis in zip(*(piece.coordinate for piece in self.pieces)))

    def blocks(self) -> Iterator[Block]:
        mesh_shape = self._mesh_shape()
        for origin, piece in zip(self.origins, self.pieces):
            offset, size = [0] * len(piece.shape), list(piece.shape)
            for ranks, index, dim in zip(mesh_shape, piece.coordinate, piece.placements):
                if dim is not None:  # as torch.chunk: all pieces but the last are of one length
                    length = -(-size[dim] // ranks)
                    start = min(index * length, size[dim])
                    offset[dim], size[dim] = offset[dim] + start, min(length, size[dim] - start)
            if tuple(size) != piece.local.shape:
                raise ValueError(
                    f"{origin}: its piece of {self.name} has the shape {tuple(piece.local.shape)}, "
                    f"expected {tuple(size)}"
                )
            yield origin, tuple(offset), piece.local

    def joined(self) -> torch.Tensor:
        mesh_shape, placements = self._mesh_shape(), self.pieces[0].placements
        at = {piece.coordinate: piece.local for piece in self.pieces}

        def gathered(coordinate: Shape) -> torch.Tensor:
            axis = len(coordinate)
            if axis == len(mesh_shape):
                return at[coordinate]
            if placements[axis] is None:
                return gathered((*coordinate, 0))
            return torch.cat([gathered((*coordinate, i)) for i in range(mesh_shape[axis])], placements[axis])

        return gathered(())


class _ShardedTensors(_Assembly):
    def info(self, expected: Shape | None = None) -> TensorInfo:
        piece: ShardedTensorPiece = self.pieces[0]
        dtype = next(block.dtype for each in self.pieces for _, block in each.blocks)
        return TensorInfo(piece.shape, dtype)

    def blocks(self) -> Iterator[Block]:
        for origin, piece in zip(self.origins, self.pieces):
            yield from ((origin, offset, block) for offset, block in piece.blocks)

    def joined(self) -> torch.Tensor:
        return join([(offset, block) for _, offset, block in self.blocks() if block.numel()])


class _PlainTensors(_Assembly):
    """Tensors that do not say whether they are copies or rows of a whole: the shape in the model tells."""

    copies: bool | None = None

    def info(self, expected: Shape | None = None) -> TensorInfo:
        if self.copies is None:
            self.copies = self._are_copies(expected)
        first = self.pieces[0]
        if self.copies:
            return TensorInfo(tuple(first.shape), first.dtype)
        return TensorInfo((sum(len(piece) for piece in self.pieces), *first.shape[1:]), first.dtype)

    def _are_copies(self, expected: Shape | None) -> bool:
        shapes = [tuple(piece.shape) for piece in self.pieces]
        if len(shapes) == 1 or all(shape == expected for shape in shapes):
            return True
        rows = [shape[0] if shape else 0 for shape in shapes]
        if expected and all(s[1:] == expected[1:] for s in shapes if s) and sum(rows) == expected[0]:
            return False
        raise ValueError(
            f"{self.name} is a plain tensor of the shapes {shapes} in the rank files: expected copies or rows of "
            f"{'a tensor that the model knows' if expected is None else expected}"
        )

    def blocks(self) -> Iterator[Block]:
        row = 0
        for origin, piece in zip(self.origins, self.pieces):
            yield origin, (row, *[0] * (piece.dim() - 1)) if piece.dim() else (), piece
            row += 0 if self.copies else len(piece)

    def joined(self) -> torch.Tensor:
        return self.pieces[0] if self.copies else torch.cat(self.pieces)


def _assembly(name: str, origins: list[str], pieces: list) -> _Assembly:
    kinds = {DTensorPiece: _DTensors, ShardedTensorPiece: _ShardedTensors, torch.Tensor: _PlainTensors}
    found = {type(piece) for piece in pieces}
    if len(found) != 1:
        raise ValueError(f"{name} is a {' and a '.join(sorted(t.__name__ for t in found))} on different ranks")
    assembly = kinds[found.pop()]
    described = {(p.shape, p.placements) if assembly is _DTensors else p.shape for p in pieces}
    if assembly is not _PlainTensors and len(described) != 1:
        raise ValueError(
            f"the rank files disagree about the shape or placement of {name}: {sorted(map(str, described))}"
        )
    return assembly(name, origins, pieces)
