"""Gathers sharded parameters in buckets: one collective for many parameters, and memory for one bucket at a time."""

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from verl.engines.parallel import full_tensor

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
    bucket: list[tuple[str, DTensor]] = []
    size = 0
    for name, tensor in named:
        dim = _row_sharded(tensor)
        room = tensor.numel() * (dtype or tensor.dtype).itemsize
        if bucket and (dim is None or size + room > bucket_bytes or _group(bucket[0][1]) is not _group(tensor)):
            yield from _gather(bucket, dtype)
            bucket, size = [], 0
        if dim is None:
            full = full_tensor(tensor)
            yield name, full if dtype is None else full.to(dtype)
            continue
        bucket.append((name, tensor))
        size += room
    if bucket:
        yield from _gather(bucket, dtype)


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


def _gather(bucket: list[tuple[str, DTensor]], dtype: torch.dtype | None) -> Iterator[tuple[str, torch.Tensor]]:
    """Gather a bucket of parameters of one process group, with one collective per dtype."""
    by_dtype: dict[torch.dtype, list[DTensor]] = {}
    for _, tensor in bucket:
        by_dtype.setdefault(dtype or tensor.dtype, []).append(tensor)
    gathered = {to: _gather_flat(tensors, to) for to, tensors in by_dtype.items()}
    offsets = dict.fromkeys(by_dtype, 0)
    for name, tensor in bucket:
        to, ranks = dtype or tensor.dtype, _group(tensor).size()
        rows, width = -(-tensor.shape[0] // ranks), tensor.numel() // max(tensor.shape[0], 1)
        shards = gathered[to][:, offsets[to] : offsets[to] + rows * width]
        offsets[to] += rows * width
        if len(by_dtype[to]) == 1:
            del gathered[to]
        # a copy, unless the bucket holds this parameter only
        yield name, shards.reshape(ranks * rows, width)[: tensor.shape[0]].view(tensor.shape)
        del shards


def _gather_flat(tensors: list[DTensor], dtype: torch.dtype) -> torch.Tensor:
    """All-gather the shards of parameters: (ranks, elements), each shard padded to the size of the largest one."""
    group = _group(tensors[0])
    device = torch.device(tensors[0].device_mesh.device_type)
    sizes = [-(-t.shape[0] // group.size()) * (t.numel() // max(t.shape[0], 1)) for t in tensors]
    own = torch.empty(sum(sizes), dtype=dtype, device=device)
    at = 0
    for tensor, size in zip(tensors, sizes):
        shard = tensor.to_local().detach().reshape(-1)
        own[at : at + len(shard)].copy_(shard)
        own[at + len(shard) : at + size].zero_()
        at += size
    found = torch.empty(group.size() * len(own), dtype=dtype, device=device)
    dist.all_gather_into_tensor(found, own, group=group)
    return found.view(group.size(), -1)
