"""RemoteTensor: a column of a batch whose rows stay in the processes that made them.

The controller holds shape and dtype, and for every row which process has it. Choosing rows (slice, index list, mask)
and joining batches change these two lists only, so a batch may be split, reordered, repeated and handed to other
workers, and each of them pulls just its own rows from where they lie. Any other use (an operator of the controller
that reads the column) fetches the rows once; from then on they are an ordinary tensor here.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map


class Source(ABC):
    """Columns of one batch, kept somewhere. Equal to itself only."""

    @abstractmethod
    def fetch(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """The rows (n,) of column `name`, here."""


class Held(Source):
    """A column that is here: what a RemoteTensor joined with an ordinary tensor is made of."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor

    def fetch(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        return self.tensor[rows]


def assemble(shape: Sequence[int], parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """A tensor of `shape` from (positions, rows) pairs; the positions of all parts cover it exactly."""
    if len(parts) == 1 and torch.equal(parts[0][0], torch.arange(shape[0])):
        return parts[0][1]
    whole = torch.empty(tuple(shape), dtype=parts[0][1].dtype)
    for positions, rows in parts:
        whole[positions] = rows
    return whole


_T = torch.Tensor
_ABOUT_SHAPE = {
    *(p.__get__ for p in (_T.shape, _T.dtype, _T.device, _T.layout, _T.ndim, _T.requires_grad, _T.is_leaf, _T.grad_fn)),
    *(p.__get__ for p in (_T.is_cuda, _T.is_sparse, _T.is_nested, _T.is_quantized, _T.is_meta)),
    *(_T.dim, _T.size, _T.__len__, _T.numel, _T.element_size, _T.is_floating_point, _T.is_complex, _T.ndimension),
    torch.is_floating_point,
    torch.is_complex,
}
# after these, somebody may write into the memory without a trace in the tensor's version
_GIVES_MEMORY_AWAY = {_T.numpy, _T.__array__, _T.data_ptr, _T.untyped_storage, _T.data.__get__, _T.__dlpack__}


class RemoteTensor(torch.Tensor):
    """B rows of shape `row_shape`; row i is row `where[i]` of column `name` of `sources[which[i]]`.

    which, where: (B,) int64.
    """

    @staticmethod
    def __new__(
        cls,
        name: str,
        sources: Sequence[Source],
        which: torch.Tensor,
        where: torch.Tensor,
        row_shape: Sequence[int],
        dtype: torch.dtype,
    ) -> "RemoteTensor":
        return torch.Tensor._make_wrapper_subclass(cls, (len(which), *row_shape), dtype=dtype)

    def __init__(
        self,
        name: str,
        sources: Sequence[Source],
        which: torch.Tensor,
        where: torch.Tensor,
        row_shape: Sequence[int],
        dtype: torch.dtype,
    ):
        self._name, self._sources, self._which, self._where = name, tuple(sources), which, where
        self._copy: torch.Tensor | None = None
        self._version_when_read = 0

    @classmethod
    def whole(cls, name: str, source: Source, shape: Sequence[int], dtype: torch.dtype) -> "RemoteTensor":
        """All rows of one column of one source."""
        rows = torch.arange(shape[0])
        return cls(name, [source], torch.zeros_like(rows), rows, shape[1:], dtype)

    @property
    def name(self) -> str:
        return self._name

    @property
    def is_remote(self) -> bool:
        """Whether the rows where they lie are still the truth: nobody has changed a copy made here."""
        return self._copy is None or self._copy._version == self._version_when_read

    def parts(self) -> Iterator[tuple[Source, torch.Tensor, torch.Tensor]]:
        """(source, positions in this tensor, rows of the source) for each source that has rows of this tensor."""
        for i, source in enumerate(self._sources):
            positions = (self._which == i).nonzero().flatten()
            if len(positions):
                yield source, positions, self._where[positions]

    def fetch(self) -> torch.Tensor:
        """The rows as an ordinary tensor, fetched at the first call."""
        if self._copy is None:
            parts = [(positions, source.fetch(self._name, rows)) for source, positions, rows in self.parts()]
            shape = tuple(self.shape)
            copy = assemble(shape, parts) if parts else torch.empty(shape, dtype=self.dtype)
            # in this order: another thread that finds the copy must find its version too
            self._version_when_read, self._copy = copy._version, copy
        return self._copy

    def _choose(self, index: Any) -> "RemoteTensor | None":
        """The rows that `index` names; None when it is about more than rows, or when the truth is here."""
        by_rows = isinstance(index, slice) or (
            isinstance(index, torch.Tensor) and index.dim() == 1 and index.dtype in (torch.int64, torch.bool)
        )
        if not by_rows or not self.is_remote:
            return None
        which, where = self._which[index], self._where[index]
        return RemoteTensor(self._name, self._sources, which, where, self.shape[1:], self.dtype)

    @classmethod
    def _join(cls, tensors: Sequence[torch.Tensor]) -> "RemoteTensor | None":
        """The rows of all, one after another; None when they do not fit, which is then `torch.cat`'s to say."""
        first = next(t for t in tensors if isinstance(t, RemoteTensor))
        sources, which, where = [], [], []
        for tensor in tensors:
            if tensor.dtype != first.dtype or tensor.shape[1:] != first.shape[1:]:
                return None
            if isinstance(tensor, RemoteTensor) and tensor.is_remote:
                if tensor.name != first.name:
                    return None
                which.append(tensor._which + len(sources))
                where.append(tensor._where)
                sources += tensor._sources
            else:
                which.append(torch.full((len(tensor),), len(sources)))
                where.append(torch.arange(len(tensor)))
                sources.append(Held(_here(tensor)))
        return cls(first.name, sources, torch.cat(which), torch.cat(where), first.shape[1:], first.dtype)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in _ABOUT_SHAPE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        chosen = None
        if func is torch.Tensor.__getitem__ and isinstance(args[0], RemoteTensor):
            chosen = args[0]._choose(args[1])
        elif func in (torch.Tensor.index_select, torch.index_select) and len(args) == 3 and args[1] == 0:
            chosen = args[0]._choose(args[2])
        elif func is torch.cat and len(args) == 1 and not kwargs:
            chosen = cls._join(args[0])
        if chosen is not None:
            return chosen
        local_args, local_kwargs = tree_map(_here, (args, kwargs or {}))
        if func in _GIVES_MEMORY_AWAY:
            args[0]._version_when_read = -1
        return func(*local_args, **local_kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        local_args, local_kwargs = tree_map(_here, (args, kwargs or {}))
        return func(*local_args, **local_kwargs)


def _here(value: Any) -> Any:
    """An ordinary tensor from a RemoteTensor; anything else as it is."""
    return value.fetch() if isinstance(value, RemoteTensor) else value
