"""DataProto: rows stay together, columns never get lost or overwritten in silence."""

import copy
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from verl import DataProto, DataProtoValidationError
from verl.protocol import DataProtoItem

quick = settings(max_examples=40, deadline=None)


def numbered(rows: int) -> DataProto:
    """A batch whose every column tells the number of the row it belongs to."""
    number = torch.arange(rows)
    return DataProto.from_dict(
        {"flat": number, "wide": (number[:, None] * 10 + torch.arange(3)).double(), "flag": number % 2 == 0},
        {"name": [f"row{i}" for i in range(rows)], "ids": [[i, i + 1] for i in range(rows)]},
        {"temperature": 0.7},
    )


def assert_rows(batch: DataProto, expected: list[int]) -> None:
    """Every column of a `numbered` batch holds the expected rows, in that order."""
    assert len(batch) == len(expected)
    assert batch.batch["flat"].tolist() == expected
    assert batch.batch["wide"].tolist() == [[10.0 * i, 10.0 * i + 1, 10.0 * i + 2] for i in expected]
    assert batch.batch["flag"].tolist() == [i % 2 == 0 for i in expected]
    assert batch.non_tensor_batch["name"].tolist() == [f"row{i}" for i in expected]
    assert batch.non_tensor_batch["ids"].tolist() == [[i, i + 1] for i in expected]
    assert batch.non_tensor_batch["ids"].shape == (len(expected),)
    assert batch.meta_info == {"temperature": 0.7}


# ---- construction ---------------------------------------------------------------------------------------------------


def test_lists_of_one_length_stay_one_object_per_row():
    """numpy would make a (2, 2) matrix of these."""
    for values in ([[1, 2], [3, 4]], ([1, 2], [3, 4])):
        column = DataProto.from_dict(non_tensors={"ids": values}).non_tensor_batch["ids"]
        assert column.shape == (2,) and column.dtype == object
        assert [list(v) for v in column] == [[1, 2], [3, 4]]


@pytest.mark.parametrize("wrong", ["abc", {"x": 1}, 3, None, np.array(3)])
def test_an_object_column_is_a_sequence_with_one_entry_per_row(wrong):
    with pytest.raises(DataProtoValidationError, match="column 'uid': expected a tensor, an array or a list"):
        DataProto.from_single_dict({"uid": wrong})


@pytest.mark.parametrize(
    ("tensors", "objects", "message"),
    [
        ({"a": torch.zeros(3), "b": torch.zeros(2)}, {"c": [1, 2, 3]}, "of rows, found {'a': 3, 'b': 2, 'c': 3}"),
        ({"loss": torch.tensor(1.0)}, {}, "column 'loss': .* found a tensor without dimensions"),
        ({"x": [1, 2]}, {}, "column 'x': .* found list"),
        ({"uid": torch.arange(2)}, {"uid": ["a", "b"]}, r"\['uid'\] are given both as tensors and as objects"),
    ],
)
def test_columns_that_are_no_table_are_refused(tensors, objects, message):
    with pytest.raises(DataProtoValidationError, match=message):
        DataProto.from_dict(tensors, objects)


def test_from_single_dict_sorts_by_kind():
    batch = DataProto.from_single_dict({"x": torch.arange(2), "uid": ["a", "b"], "n": np.array([1, 2])}, {"k": 1})
    assert list(batch.tensors) == ["x"] and list(batch.non_tensor_batch) == ["uid", "n"] and batch.meta_info == {"k": 1}


def test_a_tensordict_of_any_batch_size_is_batched_over_rows_only():
    batch = DataProto(TensorDict({"x": torch.zeros(2, 3)}, batch_size=[2, 3]))
    assert len(batch) == 2 and batch.batch.batch_size == (2,)


def test_a_batch_without_tensors_has_rows():
    batch = DataProto.from_dict(non_tensors={"uid": ["a", "b"]})
    assert batch.batch is None and len(batch) == 2 and len(batch.select([], [])) == 2
    batch.batch = DataProto.from_dict({"x": torch.ones(2)}).batch
    assert batch.columns == ("x", "uid") and batch.batch["x"].shape == (2,)
    batch.batch = None
    assert batch.columns == ("uid",) and len(batch) == 2


def test_facts():
    batch = numbered(3)
    assert batch.columns == ("flat", "wide", "flag", "name", "ids")
    assert "wide" in batch and "ids" in batch and "width" not in batch
    assert batch.column("name") is batch.non_tensor_batch["name"] and torch.equal(batch.column("flat"), torch.arange(3))
    assert batch.nbytes() == 3 * 8 + 9 * 8 + 3
    assert repr(batch) == (
        "DataProto(3 rows; flat (3,) int64, wide (3, 3) float64, flag (3,) bool, name object, ids object; "
        "meta_info ['temperature'])"
    )
    with pytest.raises(DataProtoValidationError, match="no column 'wyde': did you mean 'wide'"):
        batch.column("wyde")


# ---- columns --------------------------------------------------------------------------------------------------------


def test_union_adds_columns_and_keeps_those_that_agree():
    left = DataProto.from_dict({"a": torch.tensor([1.0, float("nan")])}, {"uid": ["p", "q"]}, {"t": 2, "k": 0})
    right = DataProto.from_dict(
        {"a": torch.tensor([1.0, float("nan")]), "b": torch.zeros(2)}, {"uid": ["p", "q"]}, {"t": 2}
    )
    both = left.union(right)
    assert both.columns == ("a", "b", "uid") and both.meta_info == {"t": 2, "k": 0}
    with pytest.raises(DataProtoValidationError, match=r"meta_info\['t'\] is 2 in one batch and 3 in the other"):
        both.union(DataProto(meta_info={"t": 3}))


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5])),
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, 2.0])),
        (torch.tensor([1, 2]), torch.tensor([1.0, 2.0])),
        (torch.zeros(2, 1), torch.zeros(2, 2)),
        (["a", "b"], ["a", "c"]),
        (torch.tensor([1, 2]), [1, 2]),
    ],
)
def test_union_refuses_two_contents_under_one_name(mine, theirs):
    with pytest.raises(DataProtoValidationError, match=r"column 'x' is in both batches with different contents"):
        DataProto.from_single_dict({"x": mine}).union(DataProto.from_single_dict({"x": theirs}))


def test_union_needs_the_same_rows():
    with pytest.raises(DataProtoValidationError, match="union of 4 rows with 3 rows"):
        numbered(4).union(DataProto.from_dict({"b": torch.zeros(3)}))
    with pytest.raises(DataProtoValidationError, match="union of 4 rows with 0 rows"):
        numbered(4).union(DataProto.from_dict({"b": torch.zeros(0)}))
    # facts alone have no rows and join any batch
    assert_rows(numbered(2).union(DataProto(meta_info={"temperature": 0.7})), [0, 1])
    assert_rows(DataProto(meta_info={"temperature": 0.7}).union(numbered(2)), [0, 1])


def test_union_checks_the_table():
    batch = DataProto.from_dict({"responses": torch.zeros(2, 5, dtype=torch.long)})
    with pytest.raises(DataProtoValidationError, match=r"'values': expected shape \(B=2, T=5\).*found shape \(2, 4\)"):
        batch.union(DataProto.from_dict({"values": torch.zeros(2, 4)}))


def test_union_merges_metrics_and_timing():
    left = DataProto(meta_info={"metrics": {"a": 1, "b": 1}, "timing": {"gen": 2.0}})
    right = DataProto(meta_info={"metrics": {"b": 2}})
    metrics = left.meta_info["metrics"]
    assert left.union(right).meta_info == {"metrics": {"a": 1, "b": 2}, "timing": {"gen": 2.0}}
    assert metrics == {"a": 1, "b": 1} and right.meta_info == {"metrics": {"b": 2}}
    with pytest.raises(DataProtoValidationError, match=r"meta_info\['metrics'\]: expected a dict, found list"):
        left.union(DataProto(meta_info={"metrics": [{"b": 2}, {"b": 3}]}))


def test_select_keeps_what_is_named():
    batch = numbered(2)
    assert batch.select(["flat"], ["ids"], []).columns == ("flat", "ids")
    assert batch.select("flat", "ids", "temperature").meta_info == {"temperature": 0.7}
    assert batch.select(["flat"]).columns == ("flat", "name", "ids")
    assert batch.select([], []).columns == () and len(batch.select([], [])) == 2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda b: b.select(["fliat"]), "no tensor column 'fliat': did you mean 'flat'"),
        (lambda b: b.select(["name"]), "no tensor column 'name': known: flag, flat, wide"),
        (lambda b: b.select([], ["nome"]), "no object column 'nome': did you mean 'name'"),
        (lambda b: b.select([], [], ["temprature"]), "no meta_info entry 'temprature': did you mean 'temperature'"),
        (lambda b: b.pop(["wise"]), "no tensor column 'wise': did you mean 'wide'"),
        (lambda b: b.drop(["idz"]), "no column 'idz': did you mean 'ids'"),
        (lambda b: b.rename("flot", "x"), "no column 'flot': did you mean 'flat'"),
        (lambda b: b.rename(["flat", "wide"], ["x"]), "rename: expected one new name for each old one"),
        (lambda b: b.rename(["flat", "flat"], ["x", "y"]), "rename: expected one new name for each old one"),
        (lambda b: b.rename("flat", "ids"), "would give two columns the same name"),
    ],
)
def test_wrong_names_say_the_nearest(call, message):
    batch = numbered(2)
    with pytest.raises(DataProtoValidationError, match=message):
        call(batch)
    assert_rows(batch, [0, 1])


def test_pop_moves_columns_and_facts():
    batch = numbered(2)
    taken = batch.pop(["flat"], ["name"], ["temperature"])
    assert taken.columns == ("flat", "name") and taken.meta_info == {"temperature": 0.7}
    assert batch.columns == ("wide", "flag", "ids") and batch.meta_info == {}
    batch.pop(["wide", "flag"], ["ids"])
    assert batch.columns == () and len(batch) == 2


def test_rename_may_swap():
    batch = DataProto.from_dict({"a": torch.zeros(2), "b": torch.ones(2)}, {"c": ["x", "y"]})
    swapped = batch.rename(["a", "b", "c"], ["b", "a", "d"])
    assert swapped.batch["a"].tolist() == [1.0, 1.0] and swapped.batch["b"].tolist() == [0.0, 0.0]
    assert swapped.non_tensor_batch["d"].tolist() == ["x", "y"]


def test_replace_sets_columns_and_changes_their_kind():
    batch = numbered(2).replace(flat=torch.tensor([5, 6]), wide=["v", "w"], new=torch.ones(2))
    assert batch.batch["flat"].tolist() == [5, 6] and batch.column("wide").tolist() == ["v", "w"] and "new" in batch
    with pytest.raises(DataProtoValidationError, match="union of 2 rows with 3 rows"):
        numbered(2).replace(flat=torch.zeros(3))


# ---- rows -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        ([4, 0, 0], [4, 0, 0]),
        ([-1, -5], [4, 0]),
        (np.array([1, 2], dtype=np.uint8), [1, 2]),
        (torch.tensor([3, 1]), [3, 1]),
        ([], []),
        ([True, False, False, False, True], [0, 4]),
        (torch.tensor([False, True, False, True, False]), [1, 3]),
        (np.zeros(5, dtype=bool), []),
    ],
)
def test_rows_are_chosen_in_every_column(item, expected):
    assert_rows(numbered(5)[item], expected)
    assert_rows(numbered(5).select_idxs(item), expected)


@pytest.mark.parametrize(("item", "row"), [(2, 2), (-1, 4), (np.int32(3), 3), (torch.tensor(1), 1)])
def test_an_integer_gives_an_item_without_the_batch_dimension(item, row):
    batch = numbered(5).union(
        DataProto.from_dict(non_tensors={"reward_model": [{"ground_truth": i} for i in range(5)]})
    )
    found = batch[item]
    assert isinstance(found, DataProtoItem) and found.batch.batch_size == ()
    assert found.batch["flat"].item() == row and found.batch["wide"].shape == (3,)
    assert found.batch["wide"].tolist() == [10.0 * row, 10.0 * row + 1, 10.0 * row + 2]
    assert found.non_tensor_batch["reward_model"] == {"ground_truth": row}
    assert found.non_tensor_batch["ids"] == [row, row + 1] and found.meta_info == {"temperature": 0.7}


@pytest.mark.parametrize("item", [5, -6, [0, 5], torch.tensor([-6])])
def test_rows_out_of_range_are_an_index_error(item):
    with pytest.raises(IndexError, match=r"row -?\d is out of range for a batch of 5 rows"):
        numbered(5)[item]


@pytest.mark.parametrize("item", ["flat", [0.5], None, [[0, 1]], np.zeros((5, 1), bool), [True, False], np.zeros(0)])
def test_rows_are_not_chosen_by_anything_else(item):
    with pytest.raises(DataProtoValidationError, match="expected a slice, integers or a mask"):
        numbered(5)[item]


def test_iteration_gives_rows_and_ends():
    found = [(item.batch["flat"].item(), item.non_tensor_batch["name"]) for item in numbered(3)]
    assert found == [(0, "row0"), (1, "row1"), (2, "row2")]


def test_slice_is_a_view_and_an_index_is_a_copy():
    batch = numbered(4)
    assert batch.slice(1, 3).batch["wide"].data_ptr() == batch.batch["wide"][1:].data_ptr()
    assert batch[[1, 2]].batch["wide"].data_ptr() != batch.batch["wide"][1:].data_ptr()


def test_reorder_takes_permutations_only():
    assert_rows(numbered(3).reorder(torch.tensor([2, 0, 1])), [2, 0, 1])
    for wrong in ([0, 1], [0, 0, 1], [0, 1, 2, 0]):
        with pytest.raises(DataProtoValidationError, match="each index of the 3 rows exactly once"):
            numbered(3).reorder(wrong)


def test_chunk_and_split():
    for piece, expected in zip(numbered(6).chunk(3), ([0, 1], [2, 3], [4, 5])):
        assert_rows(piece, expected)
    for piece, expected in zip(numbered(5).split(2), ([0, 1], [2, 3], [4])):
        assert_rows(piece, expected)
    with pytest.raises(
        DataProtoValidationError, match=r"5 rows do not divide into 2 equal chunks: call pad_to_divisor\(2\)"
    ):
        numbered(5).chunk(2)


@pytest.mark.parametrize("call", ["split", "chunk", "repeat", "pad_to_divisor", "make_iterator"])
def test_counts_are_at_least_one(call):
    with pytest.raises(DataProtoValidationError, match="expected at least 1, found 0"):
        getattr(numbered(2), call)(0)


def test_pad_repeats_rows_from_the_front():
    padded, padding = numbered(3).pad_to_divisor(8)
    assert padding == 5
    assert_rows(padded, [0, 1, 2, 0, 1, 2, 0, 1])
    assert_rows(padded.unpad(padding), [0, 1, 2])
    for wrong in (-1, 9):
        with pytest.raises(DataProtoValidationError, match="expected 0 to 8 rows"):
            padded.unpad(wrong)


def test_a_batch_of_no_rows_goes_through_everything():
    empty = numbered(4)[[]]
    assert_rows(empty, [])
    assert_rows(empty.repeat(3), [])
    assert_rows(empty.reorder([]), [])
    assert_rows(empty.pad_to_divisor(4)[0], [])
    assert_rows(DataProto.concat(empty.split(2)), [])
    assert_rows(DataProto.concat(empty.chunk(2)), [])
    assert_rows(DataProto.concat([empty, numbered(2), empty]), [0, 1])
    assert list(empty.make_iterator(4)) == []
    assert len(DataProto()) == 0 and len(DataProto().split(3)) == 1


@quick
@given(rows=st.integers(0, 12), size=st.integers(1, 14))
def test_concat_undoes_split(rows, size):
    assert_rows(DataProto.concat(numbered(rows).split(size)), list(range(rows)))


@quick
@given(rows=st.integers(0, 12), divisor=st.integers(1, 9))
def test_unpad_undoes_pad(rows, divisor):
    padded, padding = numbered(rows).pad_to_divisor(divisor)
    assert len(padded) % divisor == 0 and 0 <= padding < divisor
    assert_rows(padded.unpad(padding), list(range(rows)))


@quick
@given(order=st.permutations(range(6)), times=st.integers(1, 4), interleave=st.booleans())
def test_reorder_and_repeat_move_every_column(order, times, interleave):
    expected = [i for i in order for _ in range(times)] if interleave else list(order) * times
    assert_rows(numbered(6).reorder(order).repeat(times, interleave), expected)


@quick
@given(index=st.lists(st.integers(-6, 5), max_size=9))
def test_indexing_agrees_with_a_list(index):
    assert_rows(numbered(6)[index], [list(range(6))[i] for i in index])


@quick
@given(start=st.integers(-8, 8), stop=st.integers(-8, 8), step=st.sampled_from([-3, -1, 1, 2, None]))
def test_slicing_agrees_with_a_list(start, stop, step):
    for rows in (numbered(6).slice(start, stop, step), numbered(6)[start:stop:step]):
        assert_rows(rows, list(range(6))[start:stop:step])


# ---- concat ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"x": torch.zeros(2, 3), "y": torch.zeros(2)}, r"batch 1 and batch 0 differ in the columns \['y'\]"),
        ({"x": [1, 2]}, r"differ in the columns \['x'\]"),
        ({"x": torch.zeros(2, 4)}, r"column 'x' has rows \(3,\) of torch.float32 in batch 0 and \(4,\) .* in batch 1"),
        ({"x": torch.zeros(2, 3).double()}, r"column 'x' has rows \(3,\) of torch.float32 .*torch.float64"),
    ],
)
def test_concat_needs_the_same_columns(other, message):
    with pytest.raises(DataProtoValidationError, match=message):
        DataProto.concat([DataProto.from_dict({"x": torch.zeros(2, 3)}), DataProto.from_single_dict(other)])


def test_concat_of_facts():
    def piece(**facts):
        return DataProto.from_dict({"x": torch.zeros(1)}, meta_info=facts)

    joined = DataProto.concat([piece(t=1.0, metrics={"a": 1}), piece(metrics={"a": 2}, step=4), piece(t=1.0)])
    assert joined.meta_info == {"t": 1.0, "step": 4, "metrics": {"a": [1, 2]}}
    nested = DataProto.concat([joined, piece(metrics={"a": 3, "b": 4})])
    assert nested.meta_info["metrics"] == {"a": [1, 2, 3], "b": [4]}
    assert joined.meta_info["metrics"] == {"a": [1, 2]}
    listed = DataProto.concat([piece(metrics=[{"a": 1}, {"a": 2}]), piece()])
    assert listed.meta_info["metrics"] == {"a": [1, 2]}
    for odd in (None, 0.5, [{"a": 1}, 2]):
        with pytest.raises(
            DataProtoValidationError, match=r"meta_info\['metrics'\]: expected a dict or a list of dicts"
        ):
            DataProto.concat([piece(metrics={"a": 1}), piece(metrics=odd)])
    with pytest.raises(DataProtoValidationError, match=r"meta_info\['t'\] is 1.0 in one batch and 0.5 in another"):
        DataProto.concat([piece(t=1.0), piece(t=0.5)])
    with pytest.raises(DataProtoValidationError, match="concat: expected at least one batch"):
        DataProto.concat([])


# ---- mini-batches ---------------------------------------------------------------------------------------------------


def order_of(batches) -> list[list[int]]:
    return [b.batch["flat"].tolist() for b in batches]


def test_make_iterator_shuffles_by_seed_alone():
    assert order_of(numbered(4).make_iterator(2, epochs=2)) == [[0, 1], [2, 3], [0, 1], [2, 3]]
    first = order_of(numbered(8).make_iterator(4, epochs=3, shuffle=True, seed=1))
    torch.manual_seed(0)
    assert first == order_of(numbered(8).make_iterator(4, epochs=3, shuffle=True, seed=1))
    assert first != order_of(numbered(8).make_iterator(4, epochs=3, shuffle=True, seed=2))
    for epoch in range(3):
        assert sorted(first[2 * epoch] + first[2 * epoch + 1]) == list(range(8))
    assert first[:2] != first[2:4]


def test_make_iterator_refuses_at_the_call():
    with pytest.raises(DataProtoValidationError, match="mini_batch_size=3 does not divide the 4 rows of the batch"):
        numbered(4).make_iterator(3)


# ---- containers are one's own ---------------------------------------------------------------------------------------

OPERATIONS = {
    "constructor": lambda b: DataProto(b.batch, b.non_tensor_batch, b.meta_info),
    "copy": lambda b: b.copy(),
    "union_other": lambda b: DataProto().union(b),
    "replace": lambda b: b.replace(other=torch.zeros(4)),
    "select": lambda b: b.select(),
    "drop": lambda b: b.drop([]),
    "pop": lambda b: b.copy().pop(["flat", "wide", "flag"], ["name", "ids"], ["temperature"]),
    "rename": lambda b: b.copy().rename([], []),
    "slice": lambda b: b[:],
    "index": lambda b: b[[0, 1, 2, 3]],
    "reorder": lambda b: b.copy().reorder(range(4)),
    "repeat": lambda b: b.repeat(1),
    "split": lambda b: b.split(4)[0],
    "chunk": lambda b: b.chunk(1)[0],
    "concat": lambda b: DataProto.concat([b]),
    "pad": lambda b: b.pad_to_divisor(4)[0],
    "unpad": lambda b: b.unpad(0),
    "iterate": lambda b: next(b.make_iterator(4)),
    "to": lambda b: b.copy().to("cpu"),
    "select_idxs": lambda b: b.select_idxs(range(4)),
    "pickle": lambda b: pickle.loads(pickle.dumps(b)),
    "shallow": copy.copy,
    "deep": copy.deepcopy,
}


def spoil(batch: DataProto) -> None:
    """Set and delete columns and facts in the containers of a batch."""
    batch.batch["flat"] = torch.full((4,), 99)
    batch.batch["added"] = torch.zeros(4)
    batch.non_tensor_batch["name"] = np.array(["changed"] * 4, dtype=object)
    del batch.non_tensor_batch["ids"]
    batch.meta_info["temperature"] = 99
    batch.meta_info["added"] = 1


@pytest.mark.parametrize("name", OPERATIONS)
def test_containers_are_never_shared(name):
    original = numbered(4)
    spoil(OPERATIONS[name](original))
    assert_rows(original, [0, 1, 2, 3])
    result = OPERATIONS[name](original)
    spoil(original)
    assert_rows(result, [0, 1, 2, 3])


def test_copy_checks_what_was_edited_by_hand():
    batch = numbered(3)
    batch.non_tensor_batch["uid"] = ["a", "b"]
    with pytest.raises(DataProtoValidationError, match="'uid': 2"):
        batch.copy()
