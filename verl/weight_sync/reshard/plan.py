"""The static plan of a reshard: which rank sends which chunk of which parameter to which rank, in which bucket.

It is a pure function of the boxes that every rank has in training and stores in the rollout, computed once per layout.
A chunk that a rank has already is only copied. Of several ranks with the same chunk, the source is one in the same
replica of the weights, so that replicas do not send to each other; if there are several, they take turns.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch

from verl.utils.shards import Box, Chunk, Shard, matrix_shape, whole

_ALIGNMENT = 8  # bytes; words of the checksums


@dataclass(frozen=True)
class Stored:
    """What a rollout rank stores of a parameter.

    Attributes:
        shape: of the full parameter.
        rows, columns: of the tensor that the rank stores, as a matrix.
        chunks: the boxes of the full parameter in it; none: zeros.
        dtype: of the tensor.
    """

    shape: tuple[int, ...]
    rows: int
    columns: int
    chunks: tuple[Chunk, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class RankLayout:
    """What one rank has in training, in the order in which it is read, and what it stores in the rollout.

    Attributes:
        replicas: as in `ShardSource`.
    """

    shards: tuple[Shard, ...]
    stored: Mapping[str, Stored]
    replicas: tuple[int, ...] = ()


class Move(NamedTuple):
    """One box of a parameter, from a training shard to the stored tensor of a rank.

    Attributes:
        shard: index in the shards of the parameter that `source` has.
        box: in the full parameter.
        at: row and column in the shard.
        to: row and column in the stored tensor.
        first: whether `target` is the first rank that needs the box: these moves together are the full parameter.
    """

    source: int
    target: int
    shard: int
    box: Box
    at: tuple[int, int]
    to: tuple[int, int]
    first: bool

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
    """A parameter of the plan.

    Attributes:
        word: bytes of the words of its checksums: the most that divide every box.
        counts_columns: whether rows have several words, so that the checksums count columns as well.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    word: int
    counts_columns: bool

    @property
    def per_word(self) -> int:
        """Elements of a word."""
        return self.word // self.dtype.itemsize


@dataclass(frozen=True)
class Bucket:
    """Moves that one collective makes, as (index of the parameter, move), in an order that all ranks share."""

    dtype: torch.dtype
    moves: tuple[tuple[int, Move], ...]


@dataclass(frozen=True)
class Plan:
    """The plan of all ranks.

    Attributes:
        parameters: in the order in which their shards are read.
        buckets: in the order in which they are sent.
        ranks: number of ranks.
    """

    parameters: tuple[Parameter, ...]
    buckets: tuple[Bucket, ...]
    ranks: int

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

    def _bytes(self, counts) -> list[int]:
        found = [0] * self.ranks
        for bucket in self.buckets:
            for _, move in bucket.moves:
                if counts(move):
                    found[move.target] += move.box.numel * bucket.dtype.itemsize
        return found


def make_plan(layouts: Sequence[RankLayout], bucket_bytes: int) -> Plan:
    """Plan the reshard of all ranks.

    Args:
        layouts: of every rank.
        bucket_bytes: max bytes that a rank sends, keeps and receives in one bucket. A chunk with one row may be larger.

    Raises:
        ValueError: the rollout needs a parameter that training does not have, or the reverse; the shards do not
            cover a parameter exactly once; or the stored chunks do not, or overlap by some of their columns.
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
            known[key] = _moves(name, shape, boxes, stored, replicas)
        parameters.append(_parameter(name, shape, known[key], stored))
        moves.append(known[key])
    return Plan(tuple(parameters), tuple(_buckets(parameters, moves, len(layouts), bucket_bytes)), len(layouts))


def _sources(layouts: Sequence[RankLayout]) -> dict[str, tuple[tuple[int, ...], dict[Box, tuple]]]:
    """Name -> shape, and box -> its (rank, index among the shards of the parameter on that rank).

    In the order in which a rank reads them. Those of pipeline stages alternate, so that all stages send at a time.
    """
    found: dict[str, tuple[tuple[int, ...], dict[Box, tuple]]] = {}
    first: dict[str, int] = {}
    for rank, layout in enumerate(layouts):
        count: dict[str, int] = {}
        for number, shard in enumerate(layout.shards):
            first[shard.name] = min(number, first.get(shard.name, number))
            shape, boxes = found.setdefault(shard.name, (shard.shape, {}))
            if shape != shard.shape:
                raise ValueError(
                    f"weight sync: {shard.name} has shape {shard.shape} on rank {rank} and {shape} on another"
                )
            index = count[shard.name] = count.get(shard.name, -1) + 1
            if shard.box.numel:
                boxes[shard.box] = (*boxes.get(shard.box, ()), (rank, index))
    for name, (shape, boxes) in found.items():
        _check_coverage(f"the training shards of {name}", shape, boxes)
    return {name: found[name] for name in sorted(found, key=first.__getitem__)}


def _check_coverage(what: str, shape: Sequence[int], boxes: Sequence[Box] | Mapping[Box, object]) -> None:
    """Check that the boxes cover every element once."""
    size, total = whole(shape).numel, sum(box.numel for box in boxes)
    ordered = sorted(boxes)
    overlap = total != size or any(
        a.intersect(b) for i, a in enumerate(ordered) for b in ordered[i + 1 :] if b.top < a.bottom
    )
    if overlap:
        raise ValueError(f"weight sync: {what}: expected each of {size} elements once, found {total}: {ordered[:4]}")


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
    name: str,
    shape: tuple[int, ...],
    sources: Mapping[Box, tuple],
    stored: Sequence[Stored],
    replicas: Sequence[tuple[int, ...]],
) -> tuple[Move, ...]:
    """The moves of one parameter."""
    moves, seen = [], set()
    for target, chunks in enumerate(_chunks_of(stored)):
        for chunk in chunks:
            first = chunk.box not in seen
            seen.add(chunk.box)
            for box, owners in sources.items():
                common = box.intersect(chunk.box)
                if common is None:
                    continue
                source, shard = _source(target, owners, replicas)
                at = common.top - box.top, common.left - box.left
                to = chunk.row + common.top - chunk.box.top, chunk.column + common.left - chunk.box.left
                moves.append(Move(source, target, shard, common, at, to, first))
    _check_coverage(f"the stored chunks of {name}", shape, seen)
    return tuple(moves)


def _chunks_of(stored: Sequence[Stored]) -> list[list[Chunk]]:
    """The chunks of each rank, cut where those of other ranks begin or end: two then have the same rows or none in
    common. With fewer key/value heads than ranks, a fused matrix may have q, k of one rank where another has q only."""
    edges = sorted({edge for tensor in stored for chunk in tensor.chunks for edge in (chunk.box.top, chunk.box.bottom)})
    return [[cut for chunk in tensor.chunks for cut in _cut(chunk, edges)] for tensor in stored]


def _cut(chunk: Chunk, edges: Sequence[int]) -> Iterator[Chunk]:
    """The chunk, cut at these rows of the full parameter, which are in order."""
    box = chunk.box
    inner = edges[bisect_right(edges, box.top) : bisect_left(edges, box.bottom)]
    for top, bottom in pairwise([box.top, *inner, box.bottom]):
        yield Chunk(box._replace(top=top, bottom=bottom), chunk.row + top - box.top, chunk.column)


def _parameter(name: str, shape: tuple[int, ...], moves: Sequence[Move], stored: Sequence[Stored]) -> Parameter:
    dtypes = {tensor.dtype for tensor in stored}
    if len(dtypes) > 1:
        raise ValueError(f"weight sync: {name} has the dtypes {sorted(map(str, dtypes))} on the rollout ranks")
    (dtype,) = dtypes
    columns = matrix_shape(shape)[1]
    edges = {columns, *(tensor.columns for tensor in stored)}
    for move in moves:
        edges |= {move.box.left, move.box.right, move.at[1], move.to[1]}
    word = max(_ALIGNMENT, dtype.itemsize)
    while any(edge * dtype.itemsize % word for edge in edges):
        word //= 2
    return Parameter(name, shape, dtype, word, columns * dtype.itemsize > word)


def room(move: Move, dtype: torch.dtype) -> int:
    """Bytes of a move in a buffer."""
    return -(-move.box.numel * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


def _sizes(moves: Sequence[Move], dtype: torch.dtype, ranks: int) -> list[int]:
    """Bytes in the buffers of every rank: what it sends, keeps and receives."""
    sizes = [0] * ranks
    for move in moves:
        size = room(move, dtype)
        sizes[move.source] += size
        if move.source != move.target:
            sizes[move.target] += size
    return sizes


def _buckets(
    parameters: Sequence[Parameter], moves: Sequence[tuple[Move, ...]], ranks: int, limit: int
) -> list[Bucket]:
    buckets: list[Bucket] = []
    gathered: list[tuple[int, Move]] = []
    filled, dtype = [0] * ranks, None

    def close() -> None:
        nonlocal gathered, filled
        if gathered:
            buckets.append(_ordered(gathered, parameters))
        gathered, filled = [], [0] * ranks

    known: dict[tuple, list[int]] = {}
    for index, (parameter, every) in enumerate(zip(parameters, moves)):
        key = (id(every), parameter.dtype)
        sizes = known[key] = known.get(key) or _sizes(every, parameter.dtype, ranks)
        total = [a + b for a, b in zip(filled, sizes)]
        if parameter.dtype != dtype or max(total) > limit:
            close()
            dtype, total = parameter.dtype, sizes
        if (count := -(-max(sizes) // limit)) > 1:  # larger than a bucket: some rows of every move in each
            for split in zip(*(move.split(count) for move in every)):
                gathered = [(index, move) for move in split if move.box.rows]
                close()
            continue
        gathered += [(index, move) for move in every]
        filled = total
    close()
    return buckets


def _ordered(moves: Sequence[tuple[int, Move]], parameters: Sequence[Parameter]) -> Bucket:
    """Rows of the same width one after the other, so that one call sums those of many parameters."""

    def width(entry: tuple[int, Move]) -> tuple:
        parameter, move = parameters[entry[0]], entry[1]
        return parameter.counts_columns, -parameter.word, move.box.columns, entry[0]

    return Bucket(parameters[moves[0][0]].dtype, tuple(sorted(moves, key=width)))
