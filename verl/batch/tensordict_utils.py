"""Functions on TensorDicts under the names of public verl's `verl.utils.tensordict_utils`.

A TensorDict holds columns of B rows, tensors (B, ...) and lists, and values of the whole batch.

    td = get_tensordict({"input_ids": ids, "labels": ["a", "b"]}, {"temperature": 1.0})
    get(td, "labels")            # ["a", "b"]
    index_select_tensor_dict(td, [1])
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict


def get_tensordict(
    tensor_dict: Mapping[str, torch.Tensor | list | np.ndarray], non_tensor_dict: Mapping[str, Any] | None = None
) -> TensorDict:
    """Make a TensorDict of columns, and of values of the whole batch.

    Raises:
        AssertionError: columns of different lengths, a list of tensors, or a name in both arguments.
    """
    values = dict(non_tensor_dict or {})
    assert not values.keys() & tensor_dict.keys(), f"in both arguments: {sorted(values.keys() & tensor_dict.keys())}"
    sizes = {name: len(column) for name, column in tensor_dict.items()}
    assert len(set(sizes.values())) <= 1, f"expected columns of one length (batch size), found {sizes}"
    td = TensorDict({}, batch_size=list(sizes.values())[:1])
    for name, column in tensor_dict.items():
        td[name] = column if isinstance(column, torch.Tensor | NonTensorStack) else _stack(name, column)
    for name, value in values.items():
        assign_non_tensor_data(td, name, value)
    return td


def _stack(name: str, column: Any) -> NonTensorStack:
    assert isinstance(column, list | np.ndarray), f"{name}: expected a tensor, a list or an array, found {type(column)}"
    assert not any(isinstance(v, torch.Tensor) for v in column), f"{name}: expected no list of tensors: stack them"
    return NonTensorStack.from_list([NonTensorData(value) for value in column])


def assign_non_tensor_data(tensor_dict: TensorDict, key: str, val: Any) -> None:
    """Set a value of the whole batch, in place."""
    tensor_dict[key] = NonTensorData(val)


def assign_non_tensor(tensor_dict: TensorDict, **kwargs: Any) -> TensorDict:
    """Set columns (lists) and values of the whole batch (anything else), in place."""
    for name, value in kwargs.items():
        tensor_dict[name] = _stack(name, value) if isinstance(value, list) else NonTensorData(value)
    return tensor_dict


def get(tensordict: TensorDict, key: str, default: Any = None) -> Any:
    """A column as a tensor or a list, a value of the whole batch as it was set, or the default."""
    column = tensordict.get(key, default)
    if isinstance(column, NonTensorStack):
        return column.tolist()
    return column.data if isinstance(column, NonTensorData) else column


get_non_tensor_data = get


def pop(tensordict: TensorDict, key: str, default: Any = None) -> Any:
    """Like `get`, and removes the entry."""
    value = get(tensordict, key, default)
    tensordict.pop(key, None)
    return value


def _is_value(column: Any) -> bool:
    """Whether this is a value of the whole batch."""
    return isinstance(column, NonTensorData) and not isinstance(column, NonTensorStack)


def index_select_tensor_dict(batch: TensorDict, indices: torch.Tensor | list[int]) -> TensorDict:
    """The rows `indices`, (n,), of columns that are not nested tensors. Values of the whole batch stay."""
    index = torch.as_tensor(indices, dtype=torch.long)
    columns = {key: batch.get(key) for key in list(batch.keys())}
    rows = {key: column if _is_value(column) else column[index] for key, column in columns.items()}
    return TensorDict(rows, batch_size=[len(index)])


def concat_tensordict(data: Sequence[TensorDict]) -> TensorDict:
    """Concatenate along the rows. Without rows, and for values of the whole batch, the first one counts."""
    if not data[0].batch_size:
        return data[0]
    values = {key: data[0].get(key) for key in list(data[0].keys()) if _is_value(data[0].get(key))}
    return TensorDict.cat([td.exclude(*values) for td in data], dim=0).update(values)


def chunk_tensordict(td: TensorDict, chunks: int) -> list[TensorDict]:
    """Split the rows into chunks of equal size. AssertionError if there are none."""
    assert len(td) % chunks == 0, f"expected rows divisible by {chunks}, found {len(td)}"
    return [index_select_tensor_dict(td, rows) for rows in torch.arange(len(td)).chunk(chunks)]


def pad_to_divisor(data: TensorDict, size_divisor: int) -> tuple[TensorDict, int]:
    """Repeat rows from the start until their number is divisible. Returns the batch and the number of added rows."""
    padding = -len(data) % size_divisor
    rows = torch.arange(len(data) + padding) % len(data)
    return (index_select_tensor_dict(data, rows), padding) if padding else (data, 0)


def unpad(data: TensorDict, pad_size: int) -> TensorDict:
    """Drop the rows that `pad_to_divisor` added."""
    return index_select_tensor_dict(data, torch.arange(len(data) - pad_size)) if pad_size else data
