"""Batches by reference, with shelves in this process in the place of ranks."""

import numpy as np
import torch

from verl.protocol import DataProto
from verl.single_controller.data_plane import KEEP_BYTES, PackedCall, Shelf, load_call, nbytes, unpack, unpack_result
from verl.single_controller.remote_tensor import RemoteTensor, Source

WIDTH = 4096  # float32 columns of this width stay where they are from 5 rows on


class Reader(Source):
    """Reads a shelf directly, and counts the rows."""

    def __init__(self, shelf: Shelf, key: int):
        self.shelf, self.key, self.rows = shelf, key, 0

    def fetch(self, name, rows):
        self.rows += len(rows)
        return unpack(self.shelf.pack_rows(self.key, [name], rows))[name]


def make(shelf: Shelf, start: int, rows: int) -> tuple[DataProto, DataProto]:
    """A batch made by a rank, and what the controller sees of it."""
    x = torch.arange(start, start + rows).float()[:, None].expand(rows, WIDTH)
    batch = DataProto.from_dict(
        {"x": x, "y": -x, "small": torch.arange(rows)}, {"uid": [f"{start + i}" for i in range(rows)]}, {"t": 1}
    )
    seen = {}
    return batch, unpack_result(shelf.pack_result(batch), lambda key: seen.setdefault(key, Reader(shelf, key)))


def call(to: Shelf, value) -> tuple[object, list[int]]:
    """Send arguments to a rank: what it gets, and how many rows were taken for each Take."""
    packed = PackedCall(value)
    taken = [t.source.shelf.take(t.source.key, t.names, t.rows) for t in packed.takes]
    return load_call(packed.packed, taken), [len(t.rows) for t in packed.takes]


def test_the_controller_holds_small_columns_only():
    shelf = Shelf()
    batch, seen = make(shelf, 0, 8)
    assert type(seen.batch["x"]) is RemoteTensor and type(seen.batch["small"]) is torch.Tensor
    assert seen.non_tensor_batch["uid"].tolist() == [str(i) for i in range(8)] and seen.meta_info == {"t": 1}
    assert nbytes(shelf.pack_result(batch)) < 2000 < KEEP_BYTES
    assert torch.equal(seen.batch["x"] + 0, batch.batch["x"])


def test_each_rank_takes_its_own_rows_only():
    """Rows of two makers, shuffled and split over two other ranks."""
    first, second = Shelf(), Shelf()
    whole = DataProto.concat([make(first, 0, 8)[1], make(second, 8, 8)[1]]).reorder(np.arange(16)[::-1])
    for part, maker in zip(whole.chunk(2), [1, 0]):
        (got,), rows = call(Shelf(), (part,))
        assert rows == [8] and torch.equal(got.batch["x"][:, 0], part.batch["small"] + 8.0 * maker)
        assert torch.equal(got.batch["y"], -got.batch["x"]) and type(got.batch["x"]) is torch.Tensor
        got.batch["x"].zero_()
    mixed = whole[[0, 15, 3, 3]]
    (got, again), rows = call(Shelf(), (mixed, mixed.select(["x"])))
    assert (
        sorted(rows) == [1, 3] and got.batch["x"][:, 5].tolist() == [15, 0, 12, 12] == again.batch["x"][:, 5].tolist()
    )
    assert all(s.rows == 0 for s in whole.batch["x"]._sources), "the controller has fetched nothing"


def test_later_changes_on_the_rank_do_not_change_its_result():
    shelf = Shelf()
    buffer = torch.ones(8, WIDTH)
    seen = unpack_result(shelf.pack_result(DataProto.from_dict({"x": buffer})), lambda key: Reader(shelf, key))
    buffer.zero_()
    assert seen.batch["x"].sum() == 8 * WIDTH


def test_what_the_controller_has_changed_is_sent_as_it_is():
    shelf = Shelf()
    _, seen = make(shelf, 0, 8)
    seen.batch["x"][0] = 99
    (got,), rows = call(Shelf(), (seen,))
    assert got.batch["x"][:2, 0].tolist() == [99, 1] and rows == [8], "y still goes by reference, x does not"


def test_rows_joined_with_ordinary_ones():
    shelf = Shelf()
    _, seen = make(shelf, 0, 8)
    joined = DataProto.concat(
        [seen, DataProto.from_dict({k: v[:2] + 0 for k, v in seen.tensors.items()}, {"uid": ["a", "b"]})]
    )
    (got,), rows = call(Shelf(), (joined[[0, 9]],))
    assert got.batch["x"][:, 0].tolist() == [0, 1] and rows == [1]


def test_dropping():
    shelf = Shelf()
    _, seen = make(shelf, 0, 8)
    key = seen.batch["x"]._sources[0].key
    shelf.drop([key])
    try:
        seen.batch["x"].sum()
        raise AssertionError("the rows are gone")
    except KeyError:
        pass
