"""Batches passed by reference: large columns stay on the rank that produced them.

    result, columns = pack_result(batch)           # on the rank: everything but the large columns, and these
    seen = unpack_result(result, source)           # on the controller: a RemoteTensor for each large column
    call = PackedCall((seen,))                     # the arguments of the next call, and the sources it refers to
    (batch,) = load_call(call.packed, sources)     # on the rank that is called, with these sources

A `RemoteTensor` holds a shape, a dtype and, for every row, the `Source` that has it. Indexing rows (slice, index
tensor, mask) and concatenating batches only change these lists, so a batch can be split, reordered, repeated and sent
to other workers, each of which fetches only its own rows. Any other use, such as a controller operator that reads the
column, fetches the rows once; from then on the column behaves as a local tensor.

This module does not move data. Between processes of one host `local.transport` does, with memory files; between Ray
actors the object store of Ray does.
"""

import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map

from verl.protocol import DataProto

MAX_INLINE_BYTES = 1 << 16  # larger columns stay on the rank that produced them

# ---- remote tensors -----------------------------------------------------------------------------------------------


class Source(ABC):
    """The columns of one batch in some process. Compares equal to itself only."""

    @abstractmethod
    def fetch(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """Copy rows of the column `name` to this process.

        Args:
            rows: (n,) int64 row indices.

        Returns:
            (n, *row_shape) CPU tensor.
        """


def assemble_rows(shape: Sequence[int], chunks: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Build a tensor of `shape` from (positions, rows) pairs whose positions together cover it exactly once."""
    if len(chunks) == 1 and torch.equal(chunks[0][0], torch.arange(shape[0])):
        return chunks[0][1]
    out = torch.empty(tuple(shape), dtype=chunks[0][1].dtype)
    for positions, rows in chunks:
        out[positions] = rows
    return out


_T = torch.Tensor
_METADATA_FUNCTIONS = {
    *(p.__get__ for p in (_T.shape, _T.dtype, _T.device, _T.layout, _T.ndim, _T.requires_grad, _T.is_leaf, _T.grad_fn)),
    *(p.__get__ for p in (_T.is_cuda, _T.is_sparse, _T.is_nested, _T.is_quantized, _T.is_meta)),
    *(_T.dim, _T.size, _T.__len__, _T.numel, _T.element_size, _T.is_floating_point, _T.is_complex, _T.ndimension),
    torch.is_floating_point,
    torch.is_complex,
}
# After one of these calls the memory can be written without a change of the tensor's version counter.
_EXPOSES_MEMORY = {_T.numpy, _T.__array__, _T.data_ptr, _T.untyped_storage, _T.data.__get__, _T.__dlpack__}


class RemoteTensor(torch.Tensor):
    """A (B, *row_shape) tensor whose rows are in other processes.

    Row i is row `source_rows[i]` of column `name` of `sources[source_ids[i]]`.

    Args:
        source_ids: (B,) int64 indices into `sources`.
        source_rows: (B,) int64 row indices within each source.
    """

    @staticmethod
    def __new__(cls, name, sources, source_ids, source_rows, row_shape, dtype) -> "RemoteTensor":
        return torch.Tensor._make_wrapper_subclass(cls, (len(source_ids), *row_shape), dtype=dtype)

    def __init__(
        self,
        name: str,
        sources: Sequence[Source],
        source_ids: torch.Tensor,
        source_rows: torch.Tensor,
        row_shape: Sequence[int],
        dtype: torch.dtype,
    ):
        self._name, self._sources = name, tuple(sources)
        self._source_ids, self._source_rows = source_ids, source_rows
        self._kind = (row_shape, dtype)
        self._copy: torch.Tensor | None = None
        self._copy_version = 0

    @classmethod
    def from_source(cls, name: str, source: Source, shape: Sequence[int], dtype: torch.dtype) -> "RemoteTensor":
        """All rows of one column of one source."""
        rows = torch.arange(shape[0])
        return cls(name, [source], torch.zeros_like(rows), rows, tuple(shape[1:]), dtype)

    @property
    def name(self) -> str:
        return self._name

    @property
    def is_remote(self) -> bool:
        """Whether the sources still have the current values: a local copy, if there is one, was not modified."""
        return self._copy is None or self._copy._version == self._copy_version

    def by_source(self) -> Iterator[tuple[Source, torch.Tensor, torch.Tensor]]:
        """Yield (source, positions in this tensor, rows of the source) for each source that has rows of this tensor."""
        ids = self._source_ids
        if len(ids) and bool((ids == ids[0]).all()):  # the share of a rank
            yield self._sources[int(ids[0])], torch.arange(len(ids)), self._source_rows
            return
        order = ids.argsort(stable=True)
        numbers, counts = ids[order].unique_consecutive(return_counts=True)
        for i, positions in zip(numbers.tolist(), order.split(counts.tolist())):
            yield self._sources[i], positions, self._source_rows[positions]

    def fetch(self) -> torch.Tensor:
        """Return the rows as an ordinary tensor. The first call fetches them, later calls return the same tensor."""
        if self._copy is None:
            chunks = [(positions, source.fetch(self._name, rows)) for source, positions, rows in self.by_source()]
            shape = tuple(self.shape)
            copy = assemble_rows(shape, chunks) if chunks else torch.empty(shape, dtype=self.dtype)
            # The version first: another thread that sees the copy must see its version too.
            self._copy_version, self._copy = copy._version, copy
        return self._copy

    def _select_rows(self, index: Any) -> "RemoteTensor | None":
        """Index the rows; None if `index` does more than select rows, or if the current values are local."""
        by_rows = isinstance(index, slice) or (
            isinstance(index, torch.Tensor) and index.dim() == 1 and index.dtype in (torch.int64, torch.bool)
        )
        if not by_rows or not self.is_remote:
            return None
        ids, rows = self._source_ids[index], self._source_rows[index]
        return RemoteTensor(self._name, self._sources, ids, rows, *self._kind)

    def __getitem__(self, index: Any) -> torch.Tensor:
        selected = self._select_rows(index)  # a share for each rank: without the detour over `__torch_function__`
        return super().__getitem__(index) if selected is None else selected

    @classmethod
    def _concat(cls, tensors: Sequence[torch.Tensor]) -> "RemoteTensor | None":
        """Concatenate along the rows; None if a tensor is local or does not match, which is left to `torch.cat`."""
        first = next(t for t in tensors if isinstance(t, RemoteTensor))
        sources, ids, rows = [], [], []
        offsets: dict[int, int] = {}  # of a tuple of sources, which the parts of one column share
        for tensor in tensors:
            is_remote = isinstance(tensor, RemoteTensor) and tensor.is_remote and tensor.name == first.name
            if not is_remote or tensor._kind != first._kind:
                return None
            if id(tensor._sources) not in offsets:
                offsets[id(tensor._sources)] = len(sources)
                sources += tensor._sources
            ids.append(tensor._source_ids + offsets[id(tensor._sources)])
            rows.append(tensor._source_rows)
        return cls(first.name, sources, torch.cat(ids), torch.cat(rows), *first._kind)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in _METADATA_FUNCTIONS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        selected = None
        if func in (torch.Tensor.index_select, torch.index_select) and len(args) == 3 and args[1] == 0:
            selected = args[0]._select_rows(args[2])
        elif func is torch.cat and len(args) == 1 and not kwargs:
            selected = cls._concat(args[0])
        if selected is not None:
            return selected
        local_args, local_kwargs = tree_map(_to_local, (args, kwargs or {}))
        if func in _EXPOSES_MEMORY:
            args[0]._copy_version = -1
        return func(*local_args, **local_kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        local_args, local_kwargs = tree_map(_to_local, (args, kwargs or {}))
        return func(*local_args, **local_kwargs)


def _to_local(value: Any) -> Any:
    return value.fetch() if isinstance(value, RemoteTensor) else value


def fetch_columns(value: Any) -> Any:
    """A batch with remote columns as one with ordinary tensors; another value as it is."""
    if not isinstance(value, DataProto) or not any(isinstance(t, RemoteTensor) for t in value.tensors.values()):
        return value
    tensors = {name: _to_local(tensor) for name, tensor in value.tensors.items()}
    return DataProto.from_dict(tensors, value.non_tensor_batch, value.meta_info)


# ---- pickles with the tensor memory out of band -------------------------------------------------------------------


def _no_reference(value: Any) -> Any:
    return None


def _rebuild_tensor(buffer: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.frombuffer(buffer, dtype=dtype).view(shape) if buffer is not None else torch.empty(shape, dtype=dtype)


class _Pickler(pickle.Pickler):
    """Collects the memory of tensors in `buffers` (pickle protocol 5); of a slice, only the memory of the slice."""

    def __init__(self, stream: BytesIO, buffers: list[pickle.PickleBuffer], to_reference: Callable[[Any], Any]):
        super().__init__(stream, protocol=5, buffer_callback=buffers.append)
        self._to_reference = to_reference

    def reducer_override(self, value: Any) -> Any:
        reference = self._to_reference(value) if isinstance(value, torch.Tensor) else None
        if reference is not None:
            return _resolved, (reference,)
        if isinstance(value, RemoteTensor):
            value = value.fetch()
        if isinstance(value, DataProto):
            return DataProto.from_dict, (value.tensors, value.non_tensor_batch, value.meta_info)
        if type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided:
            data = value.detach().cpu().contiguous()
            memory = pickle.PickleBuffer(data.reshape(-1).view(torch.uint8).numpy()) if data.numel() else None
            return _rebuild_tensor, (memory, data.dtype, tuple(data.shape))
        return NotImplemented


_RESOLVE: ContextVar[Callable[[Any], Any]] = ContextVar("_RESOLVE")  # of the `loads` that is running


def _resolved(reference: Any) -> Any:
    return _RESOLVE.get()(reference)


def dumps(value: Any, to_reference: Callable[[Any], Any] = _no_reference) -> tuple[bytes, list[memoryview]]:
    """Pickle a value, with the memory of its tensors and arrays out of band.

    Args:
        value: Any picklable value. Tensors arrive as CPU tensors without a graph.
        to_reference: Maps a tensor inside `value` to a picklable reference that is sent in its place, or to None to
            send the tensor itself.

    Returns:
        The pickle, and the buffers in the order in which `loads` takes them.
    """
    buffers: list[pickle.PickleBuffer] = []
    stream = BytesIO()
    _Pickler(stream, buffers, to_reference).dump(value)
    return stream.getvalue(), [b.raw() for b in buffers]


def loads(head: Any, buffers: Sequence[Any] = (), resolve: Callable[[Any], Any] = _no_reference) -> Any:
    """Inverse of `dumps`. Tensors use the memory of `buffers`; `resolve` maps a reference back to its value."""
    token = _RESOLVE.set(resolve)
    try:
        return pickle.loads(head, buffers=buffers)
    finally:
        _RESOLVE.reset(token)


# ---- results and calls --------------------------------------------------------------------------------------------

Packed = tuple[bytes, list[np.ndarray]]  # a pickle, and the memory of its tensors and arrays


def pack(value: Any, to_reference: Callable[[Any], Any] = _no_reference) -> Packed:
    """`dumps` with the buffers as uint8 arrays, which Ray sends without a copy."""
    head, buffers = dumps(value, to_reference)
    return head, [np.frombuffer(b, dtype=np.uint8) for b in buffers]


def unpack(packed: Packed, resolve: Callable[[Any], Any] = _no_reference) -> Any:
    """Inverse of `pack`. The tensors of the value are writable."""
    head, buffers = packed
    # Received memory may be shared with other processes and is then read-only: copy it, since the receiver may write.
    return loads(head, [b if b.flags.writeable else bytearray(b) for b in buffers], resolve)


def nbytes(packed: Packed) -> int:
    return len(packed[0]) + sum(b.nbytes for b in packed[1])


def large_columns(value: Any) -> dict[str, torch.Tensor]:
    """The tensor columns of a batch that stay on the rank that produced them; none for other values."""
    if not isinstance(value, DataProto):
        return {}
    return {name: t for name, t in value.tensors.items() if t.numel() * t.element_size() > MAX_INLINE_BYTES}


@dataclass(frozen=True, eq=False)
class Columns(Source):
    """The large columns of one batch."""

    arrays: Mapping[str, np.ndarray]  # name -> (B, bytes of a row) uint8
    kinds: Mapping[str, tuple[tuple[int, ...], torch.dtype]]  # name -> (shape of a row, dtype)

    def fetch(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        shape, dtype = self.kinds[name]
        return torch.from_numpy(self.arrays[name][rows.numpy()]).view(dtype).view(len(rows), *shape)


def pack_result(value: Any) -> tuple[Packed, Columns | None]:
    """On a rank: pack a result without its large columns. Returns them too; None if there are none."""
    large = large_columns(value)
    if not large:
        return pack(value), None
    references = {id(t): (name, tuple(t.shape), t.dtype) for name, t in large.items()}
    packed = pack(value, lambda x: references.get(id(x)))
    tensors = {name: t.detach().cpu().contiguous() for name, t in large.items()}
    arrays = {name: t.reshape(len(t), -1).view(torch.uint8).numpy() for name, t in tensors.items()}
    return packed, Columns(arrays, {name: (tuple(t.shape[1:]), t.dtype) for name, t in tensors.items()})


def unpack_result(packed: Packed, source: Source | None) -> Any:
    """On the controller: unpack a result, with a RemoteTensor for each large column, which `source` reads."""
    return unpack(packed, lambda reference: RemoteTensor.from_source(reference[0], source, *reference[1:]))


def _compact(indices: torch.Tensor) -> torch.Tensor | range:
    """Consecutive indices as a range, which is packed without a buffer."""
    numbers = indices.tolist()
    return range(numbers[0], numbers[-1] + 1) if numbers == [*range(numbers[0], numbers[-1] + 1)] else indices


def _as_tensor(indices: torch.Tensor | range) -> torch.Tensor:
    return torch.arange(indices.start, indices.stop) if isinstance(indices, range) else indices


class PackedCall:
    """The arguments of a call, packed once for all ranks that get them.

    Attributes:
        packed: The arguments without the remote columns.
        sources: Where the called rank reads these, in the order in which `load_call` takes them.
    """

    def __init__(self, value: Any):
        self._numbers: dict[Source, int] = {}
        self.packed = pack(value, self._to_reference)
        self.sources = list(self._numbers)

    def _to_reference(self, value: Any) -> Any:
        """Reference to a remote column: (shape, dtype, [(positions, index of the source, its column, rows)])."""
        if not (isinstance(value, RemoteTensor) and value.is_remote):
            return None
        chunks = []
        for source, positions, rows in value.by_source():
            number = self._numbers.setdefault(source, len(self._numbers))
            chunks.append((_compact(positions), number, value.name, _compact(rows)))
        return tuple(value.shape), value.dtype, chunks


def load_call(packed: Packed, sources: Sequence[Source]) -> Any:
    """Unpack a call on the rank that runs it: its arguments, with an ordinary tensor for each remote column.

    Args:
        packed: `PackedCall.packed`.
        sources: Those of `PackedCall.sources`, as this rank reads them.
    """

    def resolve(reference: tuple) -> torch.Tensor:
        shape, dtype, chunks = reference
        chunks = [(_as_tensor(at), sources[n].fetch(name, _as_tensor(rows))) for at, n, name, rows in chunks]
        return assemble_rows(shape, chunks) if chunks else torch.empty(shape, dtype=dtype)

    return unpack(packed, resolve)
