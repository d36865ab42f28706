"""DataProto on disk, in another process, on another device."""

import os
import pickle

import numpy as np
import pytest
import torch

from tests.test_protocol import numbered
from verl import DataProto, DataProtoValidationError
from verl.batch.containers import same


def assert_rows(batch: DataProto, expected: list[int]) -> None:
    """The rows of a `numbered` batch, in that order."""
    assert_equal(batch, numbered(4)[expected])


def assert_equal(a: DataProto, b: DataProto) -> None:
    assert len(a) == len(b) and a.columns == b.columns and a.meta_info == b.meta_info
    assert all(same(a.column(c), b.column(c)) for c in a.columns)


def test_save_and_load_round_trip(tmp_path):
    batch = numbered(5).union(DataProto.from_dict({"half": torch.tensor([1.5, float("nan"), -0.0, 2, 3]).bfloat16()}))
    batch.save(tmp_path / "new" / "batch.pt")
    loaded = DataProto.load(tmp_path / "new" / "batch.pt")
    assert_equal(loaded, batch)
    assert loaded.batch["half"].dtype == torch.bfloat16 and loaded.non_tensor_batch["ids"][4] == [4, 5]
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["batch.pt"]


def test_save_and_load_of_little(tmp_path):
    for batch in (DataProto(), numbered(3).select([], []), numbered(3)[[]], DataProto(meta_info={"k": [1]})):
        batch.save(tmp_path / "b.pt")
        assert_equal(DataProto.load(tmp_path / "b.pt"), batch)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.999])
def test_a_torn_file_is_refused_by_name(tmp_path, share):
    path = tmp_path / "batch.pt"
    numbered(50).save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(DataProtoValidationError, match=r"batch\.pt: expected a batch written by DataProto\.save"):
        DataProto.load(path)


def test_a_damaged_file_is_refused_by_name(tmp_path):
    """One byte in the middle of the numbers: they would be read as other numbers."""
    path = tmp_path / "batch.pt"
    DataProto.from_dict({"x": torch.arange(10_000)}).save(path)
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 255
    path.write_bytes(damaged)
    with pytest.raises(DataProtoValidationError, match=r"batch\.pt: .*damaged file"):
        DataProto.load(path)


def test_another_file_is_refused_by_name(tmp_path):
    torch.save({"step": 3}, tmp_path / "trainer.pt")
    (tmp_path / "notes.txt").write_text("not a batch")
    np.savez(tmp_path / "numbers.npz", x=np.zeros(2))
    for name in ("trainer.pt", "notes.txt", "numbers.npz"):
        with pytest.raises(DataProtoValidationError, match=name):
            DataProto.load(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        DataProto.load(tmp_path / "absent.pt")


def test_a_failed_save_leaves_the_old_file_and_nothing_else(tmp_path):
    numbered(2).save(tmp_path / "batch.pt")
    unpicklable = DataProto.from_dict(non_tensors={"f": [lambda: 0, lambda: 1]})
    with pytest.raises((pickle.PicklingError, AttributeError)):
        unpicklable.save(tmp_path / "batch.pt")
    assert_equal(DataProto.load(tmp_path / "batch.pt"), numbered(2))
    assert os.listdir(tmp_path) == ["batch.pt"]


def test_a_piece_takes_only_its_own_rows_along(tmp_path):
    """A slice is a view: pickling it with its whole storage would send every chunk to every worker."""
    whole = DataProto.from_dict({"x": torch.zeros(1000, 1000)})
    piece = whole[10:12]
    assert len(pickle.dumps(piece)) < 20_000
    piece.save(tmp_path / "piece.pt")
    assert (tmp_path / "piece.pt").stat().st_size < 20_000


def test_what_travels_leaves_the_graph_behind():
    batch = DataProto.from_dict({"x": torch.ones(2, requires_grad=True) * 2})
    assert not pickle.loads(pickle.dumps(batch)).batch["x"].requires_grad


def test_to_a_device_keeps_objects_and_facts():
    assert_equal(numbered(2).to(torch.device("cpu")), numbered(2))
    moved = numbered(2).to("meta")
    assert moved.batch["wide"].device.type == "meta" and moved.non_tensor_batch["name"].tolist() == ["row0", "row1"]
    assert moved[[1]].batch["wide"].shape == (1, 3)


# ---- in place --------------------------------------------------------------------------------------------------------


IN_PLACE = {
    "union": lambda b: b.union(DataProto.from_dict({"other": torch.zeros(4)}, meta_info={"k": 1})),
    "rename": lambda b: b.rename(["flat", "name"], ["number", "label"]),
    "reorder": lambda b: b.reorder(torch.tensor([3, 1, 0, 2])),
    "to": lambda b: b.to("meta"),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_some_operations_change_the_batch_and_return_it(name):
    batch, before = numbered(4), numbered(4)
    slices, selected, copied = batch[:], batch.select(), batch.copy()
    assert IN_PLACE[name](batch) is batch
    changed = {
        "union": lambda: batch.columns == (*("flat", "wide", "flag", "other"), "name", "ids") and batch.meta_info["k"],
        "rename": lambda: batch.columns == ("number", "wide", "flag", "label", "ids"),
        "reorder": lambda: assert_rows(batch, [3, 1, 0, 2]) is None,
        "to": lambda: batch.batch["flat"].is_meta,
    }
    assert changed[name]()
    for other in (slices, selected, copied):  # batches that share its columns
        assert_rows(other, [0, 1, 2, 3])
        assert other.columns == before.columns


@pytest.mark.parametrize(
    "call",
    [
        lambda b: b.union(DataProto.from_dict({"other": torch.zeros(4), "flat": torch.ones(4)})),
        lambda b: b.union(DataProto.from_dict({"values": torch.zeros(4, 2), "responses": torch.zeros(4, 3).long()})),
        lambda b: b.rename("flat", "wide"),
        lambda b: b.reorder([0, 0, 1, 2]),
    ],
)
def test_a_refused_operation_leaves_the_batch_unchanged(call):
    batch = numbered(4)
    with pytest.raises(DataProtoValidationError):
        call(batch)
    assert_rows(batch, [0, 1, 2, 3])
    assert batch.columns == ("flat", "wide", "flag", "name", "ids")
