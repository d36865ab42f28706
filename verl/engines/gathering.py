"""Full parameters and shards of them, of an engine with DTensors.

Sharded parameters are gathered in buckets: one collective for many parameters, and memory for two buckets at a time.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import wait_tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as ShardedOver

from verl.engines.parallel import full_tensor
from verl.utils.shards import Shard, boxes_of, whole

try:
    from torch.distributed._functional_collectives import all_gather_single
except ImportError:  # its name before torch 2.13, which warns about it in every process and step
    from torch.distributed._functional_collectives import all_gather_tensor as all_gather_single

#: max bytes of the gathered parameters of one collective; a larger parameter is gathered by itself
BUCKET_BYTES = 256 * 2**20


@dataclass(frozen=True)
class _Parameter:
    """A parameter to gather."""

    name: str
    tensor: torch.Tensor
    group: dist.ProcessGroup | None  # the ranks over which FSDP shards its rows; None for any other layout
    size: int  # elements of the largest shard of any rank

    @classmethod
    def describe(cls, name: str, tensor: torch.Tensor) -> "_Parameter":
        group = _group(tensor)
        if group is None:
            return cls(name, tensor, None, tensor.numel())
        rows, ranks = tensor.shape[0], group.size()
        return cls(name, tensor, group, -(-rows // ranks) * (tensor.numel() // max(rows, 1)))

    def can_join(self, other: "_Parameter") -> bool:
        """Whether one collective can gather both."""
        return self.group is not None and self.group is other.group and self.tensor.dtype == other.tensor.dtype


def gather_tensors(
    parameters: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype | None = None, bucket_bytes: int = BUCKET_BYTES
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, full tensor), in order. Collective: all ranks must iterate.

    Parameters that FSDP shards by rows are gathered together. Others, such as those of tensor parallelism, are gathered
    one by one.

    Args:
        parameters: (name, parameter); unsharded ones are yielded unchanged, apart from the dtype.
        dtype: dtype of the result; sharded parameters are cast before they are gathered. None: not cast.
    """
    previous = None
    for bucket in _buckets(parameters, dtype, bucket_bytes):
        current = _Gather(bucket, dtype)  # while the caller uses the previous bucket
        if previous is not None:
            yield from previous.finish()
        previous = current
        del current, bucket
    if previous is not None:
        yield from previous.finish()


def _buckets(
    parameters: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype | None, bucket_bytes: int
) -> Iterator[list[_Parameter]]:
    bucket: list[_Parameter] = []
    size = 0
    for name, tensor in parameters:
        parameter = _Parameter.describe(name, tensor)
        nbytes = tensor.numel() * (dtype or tensor.dtype).itemsize
        if bucket and (size + nbytes > bucket_bytes or not bucket[0].can_join(parameter)):
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += nbytes
    if bucket:
        yield bucket


def _group(tensor: torch.Tensor) -> dist.ProcessGroup | None:
    """The ranks over which the rows are sharded; None for any other layout."""
    if not isinstance(tensor, DTensor) or not tensor.ndim:
        return None
    sharded = [dim for dim, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    if len(sharded) != 1 or tensor.placements[sharded[0]] != ShardedOver(0):
        return None
    return tensor.device_mesh.get_group(sharded[0])


class _Gather:
    """A bucket that is being gathered: parameters of one group and dtype, or a single other one."""

    def __init__(self, bucket: list[_Parameter], dtype: torch.dtype | None):
        self.bucket = bucket
        self.dtype = dtype or bucket[0].tensor.dtype
        self.group = bucket[0].group
        if self.group is not None:
            self.gathered = all_gather_single(self._flat_shards(), 0, self.group)  # asynchronous

    def _flat_shards(self) -> torch.Tensor:
        """The shards of this rank, each padded to the size of the largest shard of any rank."""
        device = torch.device(self.bucket[0].tensor.device_mesh.device_type)
        shards = [parameter.tensor.to_local().detach().reshape(-1) for parameter in self.bucket]
        sizes = [parameter.size for parameter in self.bucket]
        if len(shards) == 1 and shards[0].numel() == sizes[0]:
            return shards[0].to(device, self.dtype)
        flat = torch.empty(sum(sizes), dtype=self.dtype, device=device)
        spans = [span[: len(shard)] for span, shard in zip(flat.split(sizes), shards)]  # the padding is never read
        torch._foreach_copy_(spans, shards)
        return flat

    def finish(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, full tensor)."""
        if self.group is None:
            (parameter,) = self.bucket
            yield parameter.name, full_tensor(parameter.tensor).to(self.dtype)
            return
        gathered = wait_tensor(self.gathered).view(self.group.size(), -1)
        del self.gathered
        shards = list(gathered.split([parameter.size for parameter in self.bucket], dim=1))
        del gathered
        shards.reverse()
        for parameter in self.bucket:
            shape = parameter.tensor.shape
            # a copy, unless the bucket holds this parameter only
            full = shards.pop().reshape(-1)[: parameter.tensor.numel()].view(shape)
            yield parameter.name, full
            del full


def shard_of(name: str, tensor: torch.Tensor) -> Shard | None:
    """The chunk of a parameter on this rank; None if its layout is not made of boxes, such as a sum over ranks."""
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return Shard(name, shape, whole(shape))
    mesh, placements = tensor.device_mesh, tensor.placements
    sizes, position = mesh.shape, mesh.get_coordinate()
    ranges = [[0, size] for size in shape]
    # if FSDP shards the rows of a tensor-parallel slice, apply the slice first, although its mesh dimension is last
    order = sorted(range(mesh.ndim), key=lambda i: type(placements[i]).__name__ == "_StridedShard")
    for i in order:
        if placements[i].is_replicate():
            continue
        if placements[i].is_partial() or placements[i].dim > 1:
            return None
        bounds = ranges[placements[i].dim]
        chunk = -(-(bounds[1] - bounds[0]) // sizes[i])
        start = min(bounds[0] + position[i] * chunk, bounds[1])
        bounds[:] = start, min(start + chunk, bounds[1])
    boxes = boxes_of(shape, [start for start, _ in ranges], [end - start for start, end in ranges])
    return Shard(name, shape, boxes[0]) if len(boxes) == 1 else None


def local_shard(tensor: torch.Tensor, like: torch.Tensor | None = None) -> torch.Tensor:
    """This rank's chunk of a parameter, without gradient.

    Args:
        like: a parameter whose sharding to use; None: that of `tensor`.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    if isinstance(like, DTensor) and like.placements != tensor.placements:
        tensor = tensor.redistribute(placements=like.placements)
    return tensor.to_local()
