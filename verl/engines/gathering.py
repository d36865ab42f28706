"""Gathers sharded parameters in buckets: one collective for many parameters, and memory for two buckets at a time."""

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import wait_tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from verl.engines.parallel import full_tensor

try:
    from torch.distributed._functional_collectives import all_gather_single
except ImportError:  # its name before torch 2.13, which warns about it in every process and step
    from torch.distributed._functional_collectives import all_gather_tensor as all_gather_single

#: max bytes of the gathered parameters of one collective; a larger parameter is gathered by itself
BUCKET_BYTES = 64 * 2**20


def gather_tensors(
    named: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype | None = None, bucket_bytes: int = BUCKET_BYTES
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, full tensor), in order. Collective: all ranks must iterate.

    Parameters that FSDP shards by rows are gathered together. Others, such as those of tensor parallelism, are gathered
    one by one.

    Args:
        named: (name, parameter); unsharded ones are yielded unchanged, apart from the dtype.
        dtype: dtype of the result; sharded parameters are cast before they are gathered. None: not cast.
        bucket_bytes: size of a bucket.
    """
    ahead = None
    for bucket in _buckets(named, dtype, bucket_bytes):
        started = _Gather(bucket, dtype)  # while the caller uses the previous bucket
        if ahead is not None:
            yield from ahead.finish()
        ahead = started
        del started, bucket
    if ahead is not None:
        yield from ahead.finish()


def _buckets(
    named: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype | None, bucket_bytes: int
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Split the parameters into lists that are gathered together."""
    bucket: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in named:
        room = tensor.numel() * (dtype or tensor.dtype).itemsize
        if bucket and (size + room > bucket_bytes or not _go_together(bucket[0][1], tensor)):
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += room
    if bucket:
        yield bucket


def _go_together(one: torch.Tensor, other: torch.Tensor) -> bool:
    return _group(one) is not None and _group(one) is _group(other) and one.dtype == other.dtype


def _row_sharded(tensor: torch.Tensor) -> int | None:
    """The mesh dimension over which the rows are sharded; None for any other layout."""
    if not isinstance(tensor, DTensor):
        return None
    sharded = [dim for dim, placement in enumerate(tensor.placements) if placement != Replicate()]
    if len(sharded) != 1 or tensor.placements[sharded[0]] != Shard(0) or not tensor.ndim:
        return None
    return sharded[0]


def _group(tensor: torch.Tensor) -> dist.ProcessGroup | None:
    dim = _row_sharded(tensor)
    return None if dim is None else tensor.device_mesh.get_group(dim)


class _Gather:
    """A bucket that is being gathered: parameters of one group and dtype, or a single other one."""

    def __init__(self, bucket: list[tuple[str, torch.Tensor]], dtype: torch.dtype | None):
        self.bucket = bucket
        self.dtype = dtype or bucket[0][1].dtype
        self.group = _group(bucket[0][1])
        if self.group is not None:
            self.gathered = all_gather_single(self._own(), 0, self.group)  # asynchronous

    def _own(self) -> torch.Tensor:
        """The shards of this rank, each padded to the size of the largest shard of any rank."""
        device = torch.device(self.bucket[0][1].device_mesh.device_type)
        shards = [tensor.to_local().detach().reshape(-1) for _, tensor in self.bucket]
        sizes = [rows * width for rows, width in map(self._shard, self.bucket)]
        if len(shards) == 1 and shards[0].numel() == sizes[0]:
            return shards[0].to(device, self.dtype)
        own = torch.empty(sum(sizes), dtype=self.dtype, device=device)
        for span, shard in zip(own.split(sizes), shards):
            span[: len(shard)].copy_(shard)
            span[len(shard) :].zero_()
        return own

    def _shard(self, named: tuple[str, torch.Tensor]) -> tuple[int, int]:
        """Rows of the largest shard, and elements of a row."""
        rows = named[1].shape[0]
        return -(-rows // self.group.size()), named[1].numel() // max(rows, 1)

    def finish(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, full tensor)."""
        if self.group is None:
            ((name, tensor),) = self.bucket
            yield name, full_tensor(tensor).to(self.dtype)
            return
        gathered = wait_tensor(self.gathered).view(self.group.size(), -1)
        del self.gathered
        at = 0
        for name, tensor in self.bucket:
            rows, width = self._shard((name, tensor))
            shards = gathered[:, at : at + rows * width]
            at += rows * width
            if at == gathered.shape[1]:
                del gathered
            # a copy, unless the bucket holds this parameter only
            full = shards.reshape(-1, width)[: tensor.shape[0]].view(tensor.shape)
            del shards
            yield name, full
            del full
