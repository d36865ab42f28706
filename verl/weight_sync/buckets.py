"""Buckets: consecutive parameters in one block of memory, which is sent with one call."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from verl.weight_sync.verify import ROW_BYTES, bytes_of

#: max bytes of a bucket; a larger parameter has a bucket by itself
BUCKET_BYTES = 512 * 2**20


@dataclass(frozen=True)
class Entry:
    """One parameter of a bucket. start: its byte offset."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int

    @property
    def bytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


@dataclass
class Bucket:
    """Parameters in one block of memory. content: (n,) uint8, n a multiple of 8."""

    number: int
    entries: list[Entry]
    content: torch.Tensor

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self.entries)

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) of every parameter: views of the content."""
        for entry in self.entries:
            span = self.content[entry.start : entry.start + entry.bytes]
            yield entry.name, span.view(entry.dtype).view(entry.shape)

    def parameter_at(self, byte: int) -> str:
        """The name of the parameter at a byte offset, for error messages."""
        return next((entry.name for entry in reversed(self.entries) if entry.start <= byte), self.entries[0].name)


def pack(
    weights: Iterable[tuple[str, torch.Tensor]],
    *,
    device: torch.device,
    dtype: torch.dtype | None,
    bucket_bytes: int,
    wait: Callable[[int], None] = lambda number: None,
) -> Iterator[Bucket]:
    """Pack parameters into two alternating buffers: one is filled while the other one is sent. Yields buckets from
    number 0.

    A parameter is copied before the next one is read, because a source may reuse its memory. One that is larger than a
    bucket is not copied: it has been sent before the next one is read.

    Args:
        dtype: dtype of the parameters in the buckets; None: not cast.
        bucket_bytes: max size of a bucket of several parameters.
        wait: called with the number of a bucket whose memory is used again: waits until it has been sent. The default
            is for a caller that has used a bucket before it reads the next one.
    """
    buffers: dict[int, torch.Tensor] = {}
    number, end = 0, 0
    entries: list[Entry] = []
    for name, tensor in weights:
        to, shape = dtype or tensor.dtype, tuple(tensor.shape)
        size = tensor.numel() * to.itemsize
        padded = -(-size // ROW_BYTES) * ROW_BYTES
        if entries and end + padded > bucket_bytes:
            yield Bucket(number, entries, buffers[number % 2][:end])
            number, entries, end = number + 1, [], 0
        if padded > bucket_bytes:
            tensor = bytes_of(tensor.detach().to(device, to))
            yield Bucket(number, [Entry(name, shape, to, 0)], tensor)
            wait(number)
            del tensor
            number += 1
            continue
        if not entries:
            wait(number - 2)
            if number % 2 not in buffers:
                buffers[number % 2] = torch.empty(bucket_bytes, dtype=torch.uint8, device=device)
        span = buffers[number % 2][end : end + padded]
        span[:size].view(to).view(shape).copy_(tensor.detach())
        span[size:].zero_()
        del tensor
        entries.append(Entry(name, shape, to, end))
        end += padded
    if entries:
        yield Bucket(number, entries, buffers[number % 2][:end])
