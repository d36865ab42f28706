"""Batches by reference, with columns of this process in place of ranks."""

import pickle

import numpy as np
import torch

from verl.protocol import DataProto
from verl.single_controller.remote_batch import (
    MAX_INLINE_BYTES,
    Columns,
    PackedCall,
    RemoteTensor,
    Source,
    load_call,
    nbytes,
    pack_result,
    unpack_result,
)

WIDTH = 4096  # float32 columns of this width stay on their rank from 5 rows on


class Reader(Source):
    """Reads columns, as another process gets them, and counts the rows."""

    def __init__(self, columns: Columns):
        self.columns, self.rows = pickle.loads(pickle.dumps(columns)), 0

    def fetch(self, name, rows):
        self.rows += len(rows)
        return self.columns.fetch(name, rows)


def make(start: int, rows: int) -> tuple[DataProto, DataProto]:
    """A batch of a rank, and what the controller sees of it."""
    x = torch.arange(start, start + rows).float()[:, None].expand(rows, WIDTH)
    batch = DataProto.from_dict(
        {"x": x, "y": -x, "small": torch.arange(rows)}, {"uid": [f"{start + i}" for i in range(rows)]}, {"t": 1}
    )
    packed, columns = pack_result(batch)
    assert nbytes(packed) < 2000 < MAX_INLINE_BYTES
    return batch, unpack_result(packed, Reader(columns))


def call(value) -> tuple[object, list[int]]:
    """Send arguments to a rank: what it gets, and the number of rows that it reads from each source."""
    packed = PackedCall(value)
    readers = [Reader(source.columns) for source in packed.sources]
    return load_call(packed.packed, readers), [reader.rows for reader in readers]


def test_the_controller_holds_small_columns_only():
    batch, seen = make(0, 8)
    assert type(seen.batch["x"]) is RemoteTensor and type(seen.batch["small"]) is torch.Tensor
    assert seen.non_tensor_batch["uid"].tolist() == [str(i) for i in range(8)] and seen.meta_info == {"t": 1}
    assert torch.equal(seen.batch["x"] + 0, batch.batch["x"])


def test_columns_of_every_kind():
    tensors = [torch.arange(20_000), torch.arange(100_000).view(5, 2, 10_000), torch.randn(4, 20_000)]
    for tensor in (*tensors, tensors[1] % 3 == 0, tensors[2].bfloat16()):
        packed, kept = pack_result(DataProto.from_dict({"x": tensor}))
        seen = unpack_result(packed, Reader(kept)).batch["x"]
        assert type(seen) is RemoteTensor and seen.dtype == tensor.dtype and torch.equal(seen[[2, 0]], tensor[[2, 0]])


def test_each_rank_gets_its_own_rows_only():
    """Rows of two ranks, shuffled and split over two other ranks."""
    whole = DataProto.concat([make(0, 8)[1], make(8, 8)[1]]).reorder(np.arange(16)[::-1])
    for chunk, rank in zip(whole.chunk(2), [1, 0]):
        (got,), rows = call((chunk,))
        assert rows == [2 * 8] and torch.equal(got.batch["x"][:, 0], chunk.batch["small"] + 8.0 * rank)
        assert torch.equal(got.batch["y"], -got.batch["x"]) and type(got.batch["x"]) is torch.Tensor
        got.batch["x"].zero_()
    mixed = whole[[0, 15, 3, 3]].select(["x"])
    (got, again), _ = call((mixed, mixed.copy()))
    assert got.batch["x"][:, 5].tolist() == [15, 0, 12, 12] == again.batch["x"][:, 5].tolist()
    assert all(s.rows == 0 for s in whole.batch["x"]._sources), "the controller has fetched nothing"


def test_columns_modified_by_the_controller_are_sent():
    _, seen = make(0, 8)
    seen.batch["x"][0] = 99
    (got,), rows = call((seen,))
    assert got.batch["x"][:2, 0].tolist() == [99, 1] and rows == [8], "y is still passed by reference, x is not"


def test_rows_concatenated_with_local_rows():
    """The rows are fetched."""
    _, seen = make(0, 8)
    joined = DataProto.concat(
        [seen, DataProto.from_dict({k: v[:2] + 0 for k, v in seen.tensors.items()}, {"uid": ["a", "b"]})]
    )
    (got,), rows = call((joined[[0, 9]],))
    assert got.batch["x"][:, 0].tolist() == [0, 1] and rows == []
