"""Batches by reference, with column stores of this process in place of ranks."""

import numpy as np
import pytest
import torch

from verl.protocol import DataProto
from verl.single_controller.remote_batch import (
    MAX_INLINE_BYTES,
    ColumnStore,
    PackedCall,
    RemoteTensor,
    Source,
    load_call,
    nbytes,
    unpack_result,
)

WIDTH = 4096  # float32 columns of this width stay in the store from 5 rows on


class Reader(Source):
    """Reads a column store directly, and counts the rows."""

    def __init__(self, store: ColumnStore, key: int):
        self.store, self.key, self.rows = store, key, 0

    def fetch(self, name, rows):
        self.rows += len(rows)
        return self.store.read(self.key, [name], rows)[name]


def make(store: ColumnStore, start: int, rows: int) -> tuple[DataProto, DataProto]:
    """A batch of a rank, and what the controller sees of it."""
    x = torch.arange(start, start + rows).float()[:, None].expand(rows, WIDTH)
    batch = DataProto.from_dict(
        {"x": x, "y": -x, "small": torch.arange(rows)}, {"uid": [f"{start + i}" for i in range(rows)]}, {"t": 1}
    )
    seen = {}
    return batch, unpack_result(store.pack_result(batch), lambda key: seen.setdefault(key, Reader(store, key)))


def call(value) -> tuple[object, list[int]]:
    """Send arguments to a rank: what it gets, and the number of rows of each ColumnRef."""
    packed = PackedCall(value)
    columns = [ref.source.store.read(ref.source.key, ref.names, ref.rows) for ref in packed.refs]
    return load_call(packed.packed, columns), [len(ref.rows) for ref in packed.refs]


def test_the_controller_holds_small_columns_only():
    store = ColumnStore()
    batch, seen = make(store, 0, 8)
    assert type(seen.batch["x"]) is RemoteTensor and type(seen.batch["small"]) is torch.Tensor
    assert seen.non_tensor_batch["uid"].tolist() == [str(i) for i in range(8)] and seen.meta_info == {"t": 1}
    assert nbytes(store.pack_result(batch)) < 2000 < MAX_INLINE_BYTES
    assert torch.equal(seen.batch["x"] + 0, batch.batch["x"])


def test_each_rank_gets_its_own_rows_only():
    """Rows of two ranks, shuffled and split over two other ranks."""
    first, second = ColumnStore(), ColumnStore()
    whole = DataProto.concat([make(first, 0, 8)[1], make(second, 8, 8)[1]]).reorder(np.arange(16)[::-1])
    for chunk, rank in zip(whole.chunk(2), [1, 0]):
        (got,), rows = call((chunk,))
        assert rows == [8] and torch.equal(got.batch["x"][:, 0], chunk.batch["small"] + 8.0 * rank)
        assert torch.equal(got.batch["y"], -got.batch["x"]) and type(got.batch["x"]) is torch.Tensor
        got.batch["x"].zero_()
    mixed = whole[[0, 15, 3, 3]]
    (got, again), rows = call((mixed, mixed.select(["x"])))
    assert (
        sorted(rows) == [1, 3] and got.batch["x"][:, 5].tolist() == [15, 0, 12, 12] == again.batch["x"][:, 5].tolist()
    )
    assert all(s.rows == 0 for s in whole.batch["x"]._sources), "the controller has fetched nothing"


def test_later_writes_on_the_rank_do_not_change_its_result():
    store = ColumnStore()
    buffer = torch.ones(8, WIDTH)
    seen = unpack_result(store.pack_result(DataProto.from_dict({"x": buffer})), lambda key: Reader(store, key))
    buffer.zero_()
    assert seen.batch["x"].sum() == 8 * WIDTH


def test_columns_modified_by_the_controller_are_sent():
    _, seen = make(ColumnStore(), 0, 8)
    seen.batch["x"][0] = 99
    (got,), rows = call((seen,))
    assert got.batch["x"][:2, 0].tolist() == [99, 1] and rows == [8], "y is still passed by reference, x is not"


def test_rows_concatenated_with_local_rows():
    _, seen = make(ColumnStore(), 0, 8)
    joined = DataProto.concat(
        [seen, DataProto.from_dict({k: v[:2] + 0 for k, v in seen.tensors.items()}, {"uid": ["a", "b"]})]
    )
    (got,), rows = call((joined[[0, 9]],))
    assert got.batch["x"][:, 0].tolist() == [0, 1] and rows == [1]


def test_dropped_columns_are_gone():
    store = ColumnStore()
    _, seen = make(store, 0, 8)
    store.drop([seen.batch["x"]._sources[0].key])
    with pytest.raises(KeyError):
        seen.batch["x"].sum()
