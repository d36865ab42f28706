"""The static plan of a reshard: which rank sends which chunk of which parameter to which rank, in which bucket.

It is a pure function of the boxes that every rank has in training and stores in the rollout, computed once per layout.
A chunk that a rank has already is only copied. Of several ranks with the same chunk, the source is one in the same
replica of the weights, so that replicas do not send to each other; if there are several, they take turns.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch

from verl.utils.shards import Box, Chunk, Shard, matrix_shape, whole

_ALIGNMENT = 8  # bytes, of every dtype


@dataclass(frozen=True)
class Stored:
    """What a rollout rank stores of a parameter."""

    shape: tuple[int, ...]  # of the full parameter
    # rows, columns: of the tensor that the rank stores, as a matrix
    rows: int
    columns: int
    chunks: tuple[Chunk, ...]  # the boxes of the full parameter in it; none: zeros
    dtype: torch.dtype  # of the tensor

    def cut(self, full: torch.Tensor) -> torch.Tensor:
        """What the rank stores of a full parameter: (rows, columns), in the dtype that it is stored in."""
        matrix = full.detach().reshape(matrix_shape(self.shape))
        stored = torch.zeros(self.rows, self.columns, dtype=self.dtype, device=full.device)
        for chunk in self.chunks:
            top, bottom, left, right = chunk.box
            rows = stored[chunk.row : chunk.row + bottom - top]
            rows[:, chunk.column : chunk.column + right - left] = matrix[top:bottom, left:right]
        return stored


@dataclass(frozen=True)
class RankLayout:
    """What one rank has in training, in the order in which it is read, and what it stores in the rollout."""

    shards: tuple[Shard, ...]
    stored: Mapping[str, Stored]
    replicas: tuple[int, ...] = ()  # as in `ShardSource`


class Move(NamedTuple):
    """One box of a parameter, from a training shard to the stored tensor of a rank."""

    source: int
    target: int
    shard: int  # index in the shards of the parameter that `source` has
    box: Box  # in the full parameter
    at: tuple[int, int]  # row and column in the shard
    to: tuple[int, int]  # row and column in the stored tensor

    def split(self, count: int) -> list["Move"]:
        """Split into so many moves of some rows each, of which some may be empty."""
        cuts = [self.box.rows * i // count for i in range(count + 1)]
        return [
            self._replace(
                box=self.box._replace(top=self.box.top + a, bottom=self.box.top + b),
                at=(self.at[0] + a, self.at[1]),
                to=(self.to[0] + a, self.to[1]),
            )
            for a, b in pairwise(cuts)
        ]


@dataclass(frozen=True)
class Parameter:
    """A parameter of the plan, in the dtype of the rollout."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Bucket:
    """Moves that one collective makes, as (number of the parameter, move), in an order that all ranks share."""

    dtype: torch.dtype
    moves: tuple[tuple[int, Move], ...]


@dataclass(frozen=True)
class Plan:
    """The plan of all ranks."""

    parameters: tuple[Parameter, ...]  # in the order in which their shards are read
    buckets: tuple[Bucket, ...]  # in the order in which they are sent
    ranks: int  # number of ranks

    @cached_property
    def received(self) -> list[int]:
        """Bytes that each rank receives from others."""
        return self._bytes(lambda move: move.source != move.target)

    @property
    def model_bytes(self) -> int:
        """Bytes of all parameters in full."""
        return sum(whole(parameter.shape).numel * parameter.dtype.itemsize for parameter in self.parameters)

    @cached_property
    def kept(self) -> list[int]:
        """Bytes that each rank needs and has already."""
        return self._bytes(lambda move: move.source == move.target)

    def _bytes(self, counts: Callable[[Move], bool]) -> list[int]:
        """Bytes of the moves to each rank that are counted."""
        sizes = [0] * self.ranks
        for bucket in self.buckets:
            for _, move in bucket.moves:
                if counts(move):
                    sizes[move.target] += move.box.numel * bucket.dtype.itemsize
        return sizes


def make_plan(layouts: Sequence[RankLayout], bucket_bytes: int) -> Plan:
    """Plan the reshard of all ranks.

    Args:
        layouts: of every rank.
        bucket_bytes: max bytes that a rank sends, keeps and receives in one bucket. A chunk with one row may be larger.

    Raises:
        ValueError: the rollout needs a parameter that training does not have, or the reverse; or some of a
            parameter is stored by no rank.
    """
    sources = _sources(layouts)
    _check_names(sources, layouts)
    replicas = [layout.replicas for layout in layouts]
    known: dict[tuple, tuple[Move, ...]] = {}  # layers are alike
    parameters, moves = [], []
    for name, (shape, boxes) in sources.items():
        stored = [layout.stored[name] for layout in layouts]
        key = (shape, tuple(boxes.items()), tuple(stored))
        if key not in known:
            _check_stored(name, shape, stored)
            known[key] = _moves(boxes, stored, replicas)
        parameters.append(Parameter(name, shape, stored[0].dtype))
        moves.append(known[key])
    return Plan(tuple(parameters), tuple(_buckets(parameters, moves, len(layouts), bucket_bytes)), len(layouts))


def _sources(layouts: Sequence[RankLayout]) -> dict[str, tuple[tuple[int, ...], dict[Box, tuple]]]:
    """Name -> shape, and box -> its (rank, index among the shards of the parameter on that rank).

    In the order in which a rank reads them. Those of pipeline stages alternate, so that all stages send at a time.
    """
    sources: dict[str, tuple[tuple[int, ...], dict[Box, tuple]]] = {}
    first: dict[str, int] = {}
    for rank, layout in enumerate(layouts):
        count: dict[str, int] = {}
        for number, shard in enumerate(layout.shards):
            first[shard.name] = min(number, first.get(shard.name, number))
            shape, boxes = sources.setdefault(shard.name, (shard.shape, {}))
            if shape != shard.shape:
                raise ValueError(
                    f"weight sync: {shard.name} has shape {shard.shape} on rank {rank} and {shape} on another"
                )
            index = count[shard.name] = count.get(shard.name, -1) + 1
            if shard.box.numel:
                boxes[shard.box] = (*boxes.get(shard.box, ()), (rank, index))
    return {name: sources[name] for name in sorted(sources, key=first.__getitem__)}


def _check_stored(name: str, shape: Sequence[int], stored: Sequence[Stored]) -> None:
    """Check that the ranks store one dtype of a parameter, and every element of it."""
    dtypes = {tensor.dtype for tensor in stored}
    if len(dtypes) > 1:
        raise ValueError(f"weight sync: {name} has the dtypes {sorted(map(str, dtypes))} on the rollout ranks")
    full, boxes = whole(shape), {chunk.box for tensor in stored for chunk in tensor.chunks}
    tops = sorted({edge for box in (full, *boxes) for edge in (box.top, box.bottom)})
    lefts = sorted({edge for box in (full, *boxes) for edge in (box.left, box.right)})
    for top, bottom in pairwise(tops):
        rows = [box for box in boxes if box.top <= top and bottom <= box.bottom]
        for left, right in pairwise(lefts):
            if not any(box.left <= left and right <= box.right for box in rows):
                raise ValueError(
                    f"weight sync: expected every element of {name} on a rollout rank, found none that stores rows "
                    f"{top} to {bottom - 1}, columns {left} to {right - 1}"
                )


def _check_names(sources: Mapping[str, tuple], layouts: Sequence[RankLayout]) -> None:
    for rank, layout in enumerate(layouts):
        missing, unknown = layout.stored.keys() - sources.keys(), sources.keys() - layout.stored.keys()
        if missing or unknown:
            raise ValueError(
                f"weight sync to rollout rank {rank}: parameters that training does not have: {sorted(missing)[:3]}; "
                f"that the rollout does not have: {sorted(unknown)[:3]}"
            )
        for name, (shape, _) in sources.items():
            if layout.stored[name].shape != shape:
                raise ValueError(
                    f"weight sync: {name} has shape {shape} in training, {layout.stored[name].shape} in the rollout"
                )


def _source(target: int, owners: Sequence[tuple[int, int]], replicas: Sequence[tuple[int, ...]]) -> tuple[int, int]:
    """The owner of a box that sends it: the target itself, else one in the smallest set of ranks around it."""
    for owner in owners:
        if owner[0] == target:
            return owner
    for level, replica in enumerate(replicas[target]):
        if near := [owner for owner in owners if replicas[owner[0]][level] == replica]:
            owners = near
            break
    return owners[target % len(owners)]


def _moves(
    sources: Mapping[Box, tuple], stored: Sequence[Stored], replicas: Sequence[tuple[int, ...]]
) -> tuple[Move, ...]:
    """The moves of one parameter."""
    moves = []
    for target, tensor in enumerate(stored):
        for chunk in tensor.chunks:
            for box, owners in sources.items():
                common = box.intersect(chunk.box)
                if common is None:
                    continue
                source, shard = _source(target, owners, replicas)
                at = common.top - box.top, common.left - box.left
                to = chunk.row + common.top - chunk.box.top, chunk.column + common.left - chunk.box.left
                moves.append(Move(source, target, shard, common, at, to))
    return tuple(moves)


def buffer_bytes(move: Move, dtype: torch.dtype) -> int:
    """Bytes of a move in a buffer, padded."""
    return -(-move.box.numel * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


def _sizes(moves: Sequence[Move], dtype: torch.dtype, ranks: int) -> list[int]:
    """Bytes in the buffers of every rank: what it sends, keeps and receives."""
    sizes = [0] * ranks
    for move in moves:
        size = buffer_bytes(move, dtype)
        sizes[move.source] += size
        if move.source != move.target:
            sizes[move.target] += size
    return sizes


def _buckets(
    parameters: Sequence[Parameter], moves: Sequence[tuple[Move, ...]], ranks: int, limit: int
) -> list[Bucket]:
    """Consecutive moves, as many as fit. A parameter that is larger than a bucket has several by itself."""
    buckets: list[Bucket] = []
    pending: list[tuple[int, Move]] = []
    filled, dtype = [0] * ranks, parameters[0].dtype if parameters else None

    def close() -> None:
        nonlocal pending, filled
        if pending:
            buckets.append(Bucket(dtype, tuple(pending)))
        pending, filled = [], [0] * ranks

    known: dict[tuple, list[int]] = {}
    for number, (parameter, its_moves) in enumerate(zip(parameters, moves)):
        key = (id(its_moves), parameter.dtype)
        sizes = known[key] = known.get(key) or _sizes(its_moves, parameter.dtype, ranks)
        total = [a + b for a, b in zip(filled, sizes)]
        if parameter.dtype != dtype or max(total) > limit:
            close()
            dtype, total = parameter.dtype, sizes
        if (count := -(-max(sizes) // limit)) > 1:  # larger than a bucket: some rows of every move in each
            for split in zip(*(move.split(count) for move in its_moves)):
                pending = [(number, move) for move in split if move.box.rows]
                close()
            continue
        pending += [(number, move) for move in its_moves]
        filled = total
    close()
    return buckets
