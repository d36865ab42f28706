"""Tensors and TensorDicts as plain containers, and unions of containers, under the names of public verl."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from verl.columns import DataProtoValidationError
from verl.utils.equality import same


def union_tensor_dict(tensor_dict1: TensorDict, tensor_dict2: TensorDict) -> TensorDict:
    """Add the entries of the second TensorDict to the first, in place, and return it.

    Raises:
        DataProtoValidationError: if the batch sizes differ, or an entry of both has different contents.
    """
    if tensor_dict1.batch_size != tensor_dict2.batch_size:
        raise DataProtoValidationError(
            f"union: expected equal batch sizes, found {tensor_dict1.batch_size} and {tensor_dict2.batch_size}"
        )
    return _union(tensor_dict1, tensor_dict2)


def union_numpy_dict(tensor_dict1: dict[str, np.ndarray], tensor_dict2: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Add the arrays of the second dict to the first, in place, and return it.

    Raises:
        DataProtoValidationError: if an array of both has different contents.
    """
    return _union(tensor_dict1, tensor_dict2)


def _union(first: Any, second: Any) -> Any:
    for name in set(first.keys()) & set(second.keys()):
        if not same(first[name], second[name]):
            raise DataProtoValidationError(f"union: {name!r} is in both with different contents")
    for name, value in second.items():
        first[name] = value
    return first


def serialize_single_tensor(obj: torch.Tensor) -> tuple[str, tuple[int, ...] | str, Any]:
    """Convert a tensor to (dtype, shape, bytes as a uint8 array), a nested one to (dtype, layout, its tensors)."""
    if obj.is_nested:
        layout = str(obj.layout).removeprefix("torch.")
        return str(obj.dtype).removeprefix("torch."), layout, [serialize_single_tensor(row) for row in obj.unbind()]
    data = obj.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return str(obj.dtype).removeprefix("torch."), tuple(obj.shape), data


def deserialize_single_tensor(arr: tuple[str, Iterable[int] | str, Any]) -> torch.Tensor:
    """Undo `serialize_single_tensor`."""
    dtype, shape, data = arr
    if isinstance(shape, str):
        return torch.nested.as_nested_tensor([*map(deserialize_single_tensor, data)], layout=getattr(torch, shape))
    flat = torch.tensor(np.frombuffer(bytes(data), dtype=np.uint8))
    return flat.view(getattr(torch, dtype)).view(tuple(shape))


def serialize_tensordict(batch: TensorDict) -> tuple[tuple[int, ...], str | None, dict[str, Any]]:
    """Convert a TensorDict of tensors to (batch size, device, name -> serialized tensor)."""
    device = None if batch.device is None else str(batch.device)
    return tuple(batch.batch_size), device, {k: serialize_single_tensor(v) for k, v in batch.items()}


def deserialize_tensordict(arr: tuple[Iterable[int], str | None, dict[str, Any]]) -> TensorDict:
    """Undo `serialize_tensordict`."""
    batch_size, device, entries = arr
    tensors = {k: deserialize_single_tensor(v) for k, v in entries.items()}
    return TensorDict(tensors, batch_size=batch_size, device=device)
