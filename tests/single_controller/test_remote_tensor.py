"""RemoteTensor, with sources that count the rows fetched from them."""

import os
import pickle

import numpy as np
import pytest
import torch

from verl import columns
from verl.protocol import DataProto
from verl.single_controller import Dispatch, Worker, WorkerSpec, register
from verl.single_controller.cluster import ResourcePool, start_pools
from verl.single_controller.remote_batch import RemoteTensor, Source


class FakeSource(Source):
    """A source that records how many rows were fetched."""

    def __init__(self, **tensors: torch.Tensor):
        self.tensors, self.fetched = tensors, []

    def fetch(self, name, rows):
        self.fetched.append((name, len(rows)))
        return self.tensors[name][rows]

    def column(self, name):
        return RemoteTensor.from_source(name, self, self.tensors[name].shape, self.tensors[name].dtype)


def source(start: int, rows: int) -> FakeSource:
    return FakeSource(
        x=torch.arange(start, start + 2 * rows).view(rows, 2).float(), n=torch.arange(start, start + rows)
    )


def batch_of(*sources: FakeSource) -> DataProto:
    return DataProto.concat(
        [DataProto.from_dict({"x": s.column("x")}, {"uid": [id(s)] * len(s.tensors["x"])}) for s in sources]
    )


def test_rows_are_selected_and_concatenated_without_being_fetched():
    a, b = source(0, 3), source(100, 2)
    expected = torch.cat([a.tensors["x"], b.tensors["x"]])
    batch = batch_of(a, b)
    assert batch.batch["x"].shape == (5, 2) and len(batch) == 5 and batch.nbytes() == 40
    order = [4, 0, 2, 1, 3]
    many = batch.reorder(order).repeat(2).union(DataProto.from_dict({"y": torch.zeros(10)}))
    columns.check(many)
    some = many.copy().rename("x", "z").select(["z"]).pad_to_divisor(4)[0].chunk(4)[1]
    picked = many[torch.arange(10) % 3 == 0]
    assert a.fetched == b.fetched == []
    assert type(some.batch["z"]) is RemoteTensor
    assert torch.equal(some.batch["z"] + 0, expected[order].repeat_interleave(2, 0)[3:6])
    assert torch.equal(picked.batch["x"] + 0, expected[order].repeat_interleave(2, 0)[[0, 3, 6, 9]])
    assert (a.fetched, b.fetched) == ([("x", 3), ("x", 2)], [("x", 2)]), "only the rows that were used"


class Reader(Worker):
    def __init__(self):
        self.variable = os.environ["WORKERS_HAVE"]

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def read(self, batch: DataProto, other: DataProto) -> DataProto:
        assert self.variable == "this"
        assert type(batch.batch["x"]) is type(other.batch["x"]) is torch.Tensor
        return DataProto.from_dict({"x": batch.batch["x"] + other.batch["x"]})


def test_a_worker_of_this_process_gets_ordinary_tensors(monkeypatch):
    """`placement.local_roles`: columns of ranks elsewhere are copied once, before the call; `trainer.worker_env`."""
    monkeypatch.setenv("WORKERS_HAVE", "")
    a, b = source(0, 3), source(100, 3)
    pools = {"main": [("actor", ResourcePool("main", (2,)))], "local": [("reader", ResourcePool("local", (1,), ()))]}
    specs = dict.fromkeys(("actor", "reader"), WorkerSpec(Reader))
    with start_pools(pools, specs, lambda roles, pool: {}, {"WORKERS_HAVE": "this"})["reader"] as group:
        found = group.read(batch_of(a), other=batch_of(b))
    assert torch.equal(found.batch["x"], a.tensors["x"] + b.tensors["x"])
    assert a.fetched == b.fetched == [("x", 3)]


def test_reading_fetches_once():
    a = source(0, 4)
    column = a.column("x")
    assert column.sum().item() == 28 and column.mean().item() == 3.5 and column.tolist()[3] == [6, 7]
    assert torch.equal(column[:, 1], torch.tensor([1.0, 3, 5, 7])) and column.max() == 7
    assert np.asarray(column).shape == (4, 2) and (column > 3).sum() == 4
    assert torch.equal(torch.stack([column, column])[1], a.tensors["x"]) and torch.equal(column.T, a.tensors["x"].T)
    assert a.fetched == [("x", 4)]


def test_local_writes_are_not_lost():
    """After a write, slices and other workers get the local copy, not the rows of the source."""
    a = source(0, 4)
    column = a.column("n")
    assert column.is_remote and column.sum() == 6 and column.is_remote
    column[0] = 50
    assert not column.is_remote and column[:2].tolist() == [50, 1] and type(column[:2]) is torch.Tensor
    assert torch.cat([column, a.column("n")]).tolist() == [50, 1, 2, 3, 0, 1, 2, 3]
    through_numpy = a.column("n")
    through_numpy.numpy()[1] = 60
    assert not through_numpy.is_remote and through_numpy[1:2].tolist() == [60]


def test_concatenated_with_an_ordinary_tensor():
    a = source(0, 2)
    joined = torch.cat([a.column("n"), torch.tensor([7, 8, 9])])
    assert type(joined) is torch.Tensor and a.fetched == [("n", 2)]
    assert joined[[3, 0]].tolist() == [8, 0] and joined.tolist() == [0, 1, 7, 8, 9]
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        torch.cat([a.column("x"), torch.zeros(2, 3)])


def test_pickles_and_files_hold_the_rows(tmp_path):
    a = source(0, 3)
    found = pickle.loads(pickle.dumps(a.column("n")))
    assert type(found) is torch.Tensor and found.tolist() == [0, 1, 2]
    batch_of(a).save(tmp_path / "batch.pt")
    assert torch.equal(DataProto.load(tmp_path / "batch.pt").batch["x"], a.tensors["x"])
    assert type(batch_of(a).to("cpu").batch["x"].clone()) is torch.Tensor


def test_empty_selections():
    column = source(0, 3).column("x")[:0]
    assert column.shape == (0, 2) and (column + 1).shape == (0, 2)
