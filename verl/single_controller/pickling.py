"""Pickles whose large parts stay outside: the memory of tensors and arrays (protocol 5, out of band), and whatever has
a stand-in that says where it is. Tensors arrive as plain CPU tensors without a graph."""

import pickle
from collections.abc import Callable, Sequence
from io import BytesIO
from typing import Any

import torch

from verl.protocol import DataProto
from verl.single_controller.remote_tensor import RemoteTensor


def _no_stand_in(value: Any) -> Any:
    return None


def _tensor_from(buffer: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.frombuffer(buffer, dtype=dtype).view(shape) if buffer is not None else torch.empty(shape, dtype=dtype)


class _Pickler(pickle.Pickler):
    """Sends the memory of tensors out of band, and of a slice only its own part. `buffers` collects it."""

    def __init__(self, stream: BytesIO, buffers: list[pickle.PickleBuffer], stand_in: Callable[[Any], Any]):
        super().__init__(stream, protocol=5, buffer_callback=buffers.append)
        self._stand_in = stand_in

    def persistent_id(self, value: Any) -> Any:
        return self._stand_in(value)

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, RemoteTensor):
            value = value.fetch()
        if isinstance(value, DataProto):
            return DataProto.from_dict, (value.tensors, value.non_tensor_batch, value.meta_info)
        if type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided:
            data = value.detach().cpu().contiguous()
            memory = pickle.PickleBuffer(data.reshape(-1).view(torch.uint8).numpy()) if data.numel() else None
            return _tensor_from, (memory, data.dtype, tuple(data.shape))
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(self, head: Any, buffers: Sequence[Any], original: Callable[[Any], Any]):
        super().__init__(BytesIO(head), buffers=buffers)
        self._original = original

    def persistent_load(self, stand_in: Any) -> Any:
        return self._original(stand_in)


def pack(value: Any, stand_in: Callable[[Any], Any] = _no_stand_in) -> tuple[bytes, list[memoryview]]:
    """The pickle of a value, and the memory of its tensors and arrays in the order that `unpack` takes it.

    stand_in: value -> what is sent in its place, or None to send the value itself.
    """
    buffers: list[pickle.PickleBuffer] = []
    stream = BytesIO()
    _Pickler(stream, buffers, stand_in).dump(value)
    return stream.getvalue(), [b.raw() for b in buffers]


def unpack(head: Any, buffers: Sequence[Any] = (), original: Callable[[Any], Any] = _no_stand_in) -> Any:
    """The value of a pack. original: stand-in -> the value that it stands for. Tensors use the buffers' memory."""
    return _Unpickler(head, buffers, original).load()
