"""The part of DataProto and verl.protocol that scripts for public verl use and the project itself does not."""

import copy
import pickle

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch.utils.data import DataLoader

from verl import DataProto, DataProtoValidationError, protocol
from verl.protocol import DataProtoConfig


def batch_of(rows: int, **facts) -> DataProto:
    return DataProto.from_dict(
        {"x": torch.arange(rows), "wide": torch.arange(rows * 4).reshape(rows, 4)},
        {"uid": [f"p{i}" for i in range(rows)], "ids": [[i, i + 1] for i in range(rows)]},
        facts,
    )


def x_of(batches) -> list[list[int]]:
    return [batch.batch["x"].tolist() for batch in batches]


# ---- automatic padding ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "chunks", "expected"),
    [(5, 2, [[0, 1, 2], [3, 4]]), (5, 4, [[0, 1], [2, 3], [4], []]), (1, 3, [[0], [], []]), (4, 2, [[0, 1], [2, 3]])],
)
def test_chunks_of_unequal_size_need_automatic_padding(rows, chunks, expected, monkeypatch):
    padded = DataProto.from_dict({"x": torch.arange(rows)}, auto_padding=True)
    assert padded.is_padding_enabled() and x_of(padded.chunk(chunks)) == expected
    assert padded[:1].is_padding_enabled() and DataProto.concat(padded.chunk(chunks)).is_padding_enabled()
    plain = DataProto.from_dict({"x": torch.arange(rows)})
    assert not plain.is_padding_enabled()
    monkeypatch.setenv("VERL_AUTO_PADDING", "1")
    assert x_of(plain.chunk(chunks)) == expected


def test_automatic_padding_of_a_process():
    with pytest.raises(ValueError, match="expected True or False, found 1"):
        DataProtoConfig.auto_padding = 1
    DataProtoConfig.auto_padding = True
    try:
        assert x_of(batch_of(3).chunk(2)) == [[0, 1], [2]]
    finally:
        DataProtoConfig.auto_padding = False
    assert not batch_of(3).is_padding_enabled()


def test_padding_repeats_the_first_or_last_row_in_place():
    first, last = batch_of(3), batch_of(3)
    assert first.padding(2, "first") is None
    last.padding(2)
    assert first.batch["x"].tolist() == [0, 1, 2, 0, 0] and last.batch["x"].tolist() == [0, 1, 2, 2, 2]
    assert last.non_tensor_batch["uid"].tolist() == ["p0", "p1", "p2", "p2", "p2"]
    with pytest.raises(DataProtoValidationError, match="expected first or last, found 'middle'"):
        last.padding(1, "middle")


def test_pad_to_a_divisor_and_back():
    padded, added = protocol.pad_dataproto_to_divisor(batch_of(3), 7)
    assert added == 4 and padded.batch["x"].tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert protocol.unpad_dataproto(padded, added).batch["x"].tolist() == [0, 1, 2]


# ---- rows -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("times", [[2, 0, 1], (2, 0, 1), np.array([2, 0, 1]), torch.tensor([2, 0, 1])])
def test_sample_level_repeat(times):
    repeated = batch_of(3).sample_level_repeat(times)
    assert repeated.batch["x"].tolist() == [0, 0, 2] and repeated.non_tensor_batch["uid"].tolist() == ["p0", "p0", "p2"]


@pytest.mark.parametrize("times", [[1, 1], [1, 1, -1], [1.0, 1.0, 1.0], 2])
def test_sample_level_repeat_needs_a_count_for_each_row(times):
    with pytest.raises(DataProtoValidationError, match="one number of at least 0 for each of the 3 rows"):
        batch_of(3).sample_level_repeat(times)


def test_unfold_column_chunks():
    unfolded = batch_of(2).unfold_column_chunks(2, ["wide", "ids"])
    assert unfolded.batch["wide"].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert unfolded.batch["x"].tolist() == [0, 0, 1, 1]
    assert [list(ids) for ids in unfolded.non_tensor_batch["ids"]] == [[0], [1], [1], [2]]
    assert unfolded.non_tensor_batch["uid"].tolist() == ["p0", "p0", "p1", "p1"]


def test_fold_and_unfold_the_batch_dimension():
    folded = protocol.fold_batch_dim(batch_of(6, t=1.0), 2)
    assert len(folded) == 2 and folded.batch["wide"].shape == (2, 3, 4) and folded.batch["x"].tolist()[1] == [3, 4, 5]
    assert folded.non_tensor_batch["uid"][1].tolist() == ["p3", "p4", "p5"]
    back = protocol.unfold_batch_dim(folded)
    assert torch.equal(back.batch["wide"], batch_of(6).batch["wide"]) and back.meta_info == {"t": 1.0}
    assert back.non_tensor_batch["ids"].tolist() == batch_of(6).non_tensor_batch["ids"].tolist()
    with pytest.raises(DataProtoValidationError, match="6 rows do not divide into 4 groups"):
        protocol.fold_batch_dim(batch_of(6), 4)


def test_collate_items():
    whole = batch_of(4, t=1.0)
    collated = protocol.collate_fn([whole[2], whole[0]])
    assert collated.batch["x"].tolist() == [2, 0] and collated.non_tensor_batch["ids"].tolist() == [[2, 3], [0, 1]]


def test_mini_batches_in_the_public_form():
    order = x_of(batch_of(8).make_iterator(4, epochs=2, seed=1, dataloader_kwargs={"shuffle": True}))
    assert sorted(order[0] + order[1]) == list(range(8)) and order[:2] != order[2:]
    assert order == x_of(batch_of(8).make_iterator(4, 2, 1, shuffle=True))
    generator = torch.Generator().manual_seed(1)  # public verl has a loader of the rows
    loader = DataLoader(range(8), 4, shuffle=True, generator=generator, collate_fn=list)
    assert order == [rows for _ in range(2) for rows in loader]
    assert x_of(batch_of(4).make_iterator(2, 1, dataloader_kwargs={"shuffle": False})) == [[0, 1], [2, 3]]
    torch.manual_seed(3)
    first = x_of(batch_of(8).make_iterator(8, shuffle=True))
    torch.manual_seed(3)
    assert x_of(batch_of(8).make_iterator(8, shuffle=True)) == first
    with pytest.raises(DataProtoValidationError, match=r"expected shuffle only, found \['num_workers'\]"):
        batch_of(4).make_iterator(2, 1, dataloader_kwargs={"num_workers": 2})


# ---- containers -----------------------------------------------------------------------------------------------------


def test_tensordict_and_back():
    whole = batch_of(3, t=0.5, metrics={"a": 1})
    there = whole.to_tensordict()
    assert there.batch_size == (3,) and there[1]["uid"] == "p1" and there["t"] == 0.5
    back = DataProto.from_tensordict(there)
    assert back.columns == whole.columns and back.meta_info == whole.meta_info
    assert torch.equal(back.batch["wide"], whole.batch["wide"])
    assert back.non_tensor_batch["ids"].tolist() == whole.non_tensor_batch["ids"].tolist()
    with pytest.raises(DataProtoValidationError, match=r"\['x'\] are both columns and entries of meta_info"):
        batch_of(3, x=1).to_tensordict()


def test_unions_of_containers_are_in_place():
    left = TensorDict({"a": torch.ones(2)}, batch_size=[2])
    assert protocol.union_tensor_dict(left, TensorDict({"a": torch.ones(2), "b": torch.zeros(2)}, [2])) is left
    assert set(left.keys()) == {"a", "b"}
    with pytest.raises(DataProtoValidationError, match="'a' is in both with different contents"):
        protocol.union_tensor_dict(left, TensorDict({"a": torch.zeros(2)}, [2]))
    with pytest.raises(DataProtoValidationError, match="expected equal batch sizes"):
        protocol.union_tensor_dict(left, TensorDict({"c": torch.zeros(3)}, [3]))
    arrays = {"a": np.array([1.0, np.nan])}
    assert protocol.union_numpy_dict(arrays, {"a": np.array([1.0, np.nan]), "b": np.array([1])}) is arrays
    with pytest.raises(DataProtoValidationError, match="'a' is in both"):
        protocol.union_numpy_dict(arrays, {"a": np.array([1.0, 2.0])})


def test_serialized_tensors():
    odd = torch.tensor([[1.5, -2.0]]).bfloat16()
    for tensor in (odd, torch.arange(6)[::2], torch.tensor([True]), torch.zeros(0, 3)):
        back = protocol.deserialize_single_tensor(protocol.serialize_single_tensor(tensor))
        assert back.dtype == tensor.dtype and torch.equal(back, tensor)
    whole = batch_of(3).batch
    back = protocol.deserialize_tensordict(protocol.serialize_tensordict(whole))
    assert back.batch_size == (3,) and torch.equal(back["wide"], whole["wide"])


def test_select_can_copy_the_objects():
    whole = batch_of(2, note={"k": [1]})
    copied, shared = whole.select(deepcopy=True), whole.select()
    whole.non_tensor_batch["ids"][0].append(9)
    whole.meta_info["note"]["k"].append(2)
    assert shared.non_tensor_batch["ids"][0] == [0, 1, 9]
    assert copied.non_tensor_batch["ids"][0] == [0, 1] and copied.meta_info == {"note": {"k": [1]}}


def test_text_and_checks(capsys, tmp_path):
    nested = {"values": [1, 2.0], "sizes": {"a": np.zeros(2)}, "pair": (1, "a"), "empty": {}}
    whole = batch_of(2, t=1.0, **nested)
    whole.print_size("batch")
    assert capsys.readouterr().out.startswith("batch, Size of tensordict: ")
    assert whole.get_data_info().splitlines() == [
        "batch",
        "  x: (2,) (torch.int64) cpu",
        "  wide: (2, 4) (torch.int64) cpu",
        "non_tensor_batch",
        "  uid: ndarray(2,) (object)",
        "  ids: ndarray(2,) (object)",
        "meta_info",
        "  t: float",
        "  values: list[float|int]",
        "  sizes: dict[str: ndarray(2,) (float64)]",
        "  pair: tuple(int, str)",
        "  empty: dict",
    ]
    assert whole.batch.device is None and whole.to("cpu").batch.device == torch.device("cpu")
    with pytest.raises(TypeError, match="expected a slice, integers or a mask"):
        whole["x"]
    assert protocol.numpy_dict_to_tensor_dict({"x": np.arange(3)})["x"].tolist() == [0, 1, 2]
    whole.save_to_disk(tmp_path / "batch.pt")
    assert DataProto.load_from_disk(tmp_path / "batch.pt").batch["x"].tolist() == [0, 1]
    whole.check_consistency()
    whole.non_tensor_batch["uid"] = ["a"]
    with pytest.raises(DataProtoValidationError, match="'uid': 1"):
        whole.check_consistency()
    with pytest.raises(DataProtoValidationError, match="num_batch_dims: expected 1, found 2"):
        DataProto.from_dict({"x": torch.zeros(2, 2)}, num_batch_dims=2)


def test_rows_of_all_ranks(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        whole = batch_of(2, t=1.0)
        assert protocol.all_gather_data_proto(whole, torch.distributed.group.WORLD) is None
        assert whole.batch["x"].tolist() == [0, 1] and whole.meta_info == {"t": 1.0}
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("entries", [[["a", "b"], ["c", "d"]], [[1, [2]], [None, {}]]])
def test_an_array_keeps_its_shape(entries):
    """Worked out with numpy's own operations on the array (2, 2)."""
    values = np.empty((2, 2), dtype=object)
    for row, column in np.ndindex(2, 2):
        values[row, column] = entries[row][column]
    batch = DataProto.from_dict({"x": torch.arange(2)}, {"pairs": values})
    results = {
        "index": (batch[[1]], values[[1]]),
        "slice": (batch[1:], values[1:]),
        "repeat": (batch.repeat(2), values.repeat(2, 0)),
        "tile": (batch.repeat(2, interleave=False), np.concatenate([values, values])),
        "concat": (DataProto.concat([batch, batch]), np.concatenate([values, values])),
        "chunks": (batch.unfold_column_chunks(2, ["pairs"]), values.reshape(4, 1)),
        "fold": (protocol.fold_batch_dim(batch.repeat(2), 2), values.repeat(2, 0).reshape(2, 2, 2)),
        "unfold": (protocol.unfold_batch_dim(protocol.fold_batch_dim(batch.repeat(2), 2)), values.repeat(2, 0)),
    }
    for name, (result, expected) in results.items():
        column = result.non_tensor_batch["pairs"]
        assert column.shape == expected.shape and (column == expected).all(), name
    assert DataProto.from_dict(non_tensors={"s": np.array(["a", "b"])}).non_tensor_batch["s"].dtype == "<U1"


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_tensors_are_serialized(layout):
    nested = torch.nested.as_nested_tensor([torch.arange(2), torch.arange(3)], layout=layout)
    back = protocol.deserialize_tensordict(protocol.serialize_tensordict(TensorDict({"n": nested}, batch_size=[2])))
    assert back["n"].layout == layout and [row.tolist() for row in back["n"].unbind()] == [[0, 1], [0, 1, 2]]


def test_rows_without_tensor_columns_have_no_tensors_either():
    batch = DataProto(None, {"answer": np.array(["a", "b"], dtype=object)})
    assert batch[1].batch is None and batch[1].non_tensor_batch == {"answer": "b"}
    collated = protocol.collate_fn([batch[1], batch[0]])
    assert collated.batch is None and collated.non_tensor_batch["answer"].tolist() == ["b", "a"]
    pairs = DataProto(None, {"pair": np.array([["a", "b"], ["c", "d"]], dtype=object)})
    assert protocol.collate_fn([pairs[1], pairs[0]]).non_tensor_batch["pair"].shape == (2, 2)


@pytest.mark.parametrize("kind", [ValueError, AssertionError, KeyError])
def test_a_conflict_is_what_public_verl_raises(kind):
    """Code of recipes catches an AssertionError of `union`, and a KeyError of `select`."""
    data = DataProto.from_dict({"a": torch.ones(2)})
    with pytest.raises(kind, match=r"^column 'a' is in both batches with different contents"):
        data.union(DataProto.from_dict({"a": torch.zeros(2)}))
    with pytest.raises(kind, match=r"^the batch has no tensor column 'b': known: a"):
        data.select(batch_keys=["b"])


def test_a_batch_whose_tensors_were_popped_keeps_an_empty_container():
    """A loop pops the inputs of the rollout, numbers rows by len(batch.batch), repeats them and adds the outputs."""
    batch = DataProto.from_dict({"x": torch.arange(2)}, {"answer": ["a", "b"]})
    assert batch.pop().batch is None and batch.pop(["x"]).batch["x"].tolist() == [0, 1]
    batch.non_tensor_batch["uid"] = np.array([f"u{i}" for i in range(len(batch.batch))], dtype=object)
    assert pickle.loads(pickle.dumps(batch)).batch.batch_size == copy.deepcopy(batch).batch.batch_size == (2,)
    repeated = batch.repeat(2)
    assert repeated.batch.batch_size == (4,) and len(repeated[1:].batch) == len(repeated[[0, 3, 3]].batch) == 3
    repeated.batch["y"] = torch.arange(4)
    assert repeated.batch["y"].tolist() == [0, 1, 2, 3]
    assert repeated.non_tensor_batch["uid"].tolist() == ["u0", "u0", "u1", "u1"]
    assert batch.copy().union(DataProto.from_dict({"y": torch.ones(2)})).batch["y"].tolist() == [1, 1]
    assert len(batch.select([]).batch) == len(DataProto(TensorDict({}, batch_size=[2])).batch) == 2
    batch.batch = None
    assert batch.batch is None and batch.repeat(2).batch is None and len(batch) == 2
    assert pickle.loads(pickle.dumps(batch)).batch is None
    assert DataProto.from_dict({}, {"answer": ["a"]}).batch is None
