"""The process group of an engine that spans ranks, and what is summed or gathered over it."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

#: that a collective may wait for the other ranks where nothing is said. Whoever called the workers has the clock: it
#: ends a call that hangs and shows the stacks of all ranks, which a rank that gives up before that would spoil
_LONGEST_WAIT = timedelta(days=1)


def init_process_group(device: torch.device, timeout: float | None = None) -> None:
    """Join the group that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe; nothing when it is joined already.

    timeout: seconds that a collective may wait for the other ranks; None leaves a hang to whoever called the workers.
    """
    if dist.is_initialized():
        return
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ValueError(f"a sharded engine needs the variables {missing}: a launcher or a worker group sets them")
    # tensors in host memory (offloaded gradients, checkpoints) are reduced too
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, timeout=_LONGEST_WAIT if timeout is None else timedelta(seconds=timeout))


def device_mesh(device_type: str, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """A mesh over all ranks, whose groups wait as long for one another as the group of all ranks does.

    torch gives them its own default, whatever the group of all ranks was told.
    """
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=names)
    for name in names:
        dist.distributed_c10d._set_pg_timeout(timeout_of(dist.group.WORLD), mesh.get_group(name))
    return mesh


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """How long the collectives of a group wait, told by its part for host tensors, which every group here has."""
    return group._get_backend(torch.device("cpu")).options._timeout


def reduce_values(
    values: list[float], op: dist.ReduceOp, device: torch.device, group: dist.ProcessGroup | None
) -> list:
    """Each value reduced over the group, in float64."""
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op, group)
    return tensor.tolist()


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor gathered from its shards, on every rank (all must ask together); a whole one as it is."""
    if not isinstance(tensor, DTensor):
        return tensor
    for dim in range(tensor.device_mesh.ndim):  # torch remarks on it when it must gather over several at once
        placements = list(tensor.placements)
        placements[dim] = Replicate()
        tensor = tensor.redistribute(placements=placements)
    return tensor.to_local()


def gradient_norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    """The 2-norm of all gradients as one vector, shards of the ranks included: a number, the same on every rank.

    Gradients may be spread over different meshes, which one reduction cannot span: those that are spread alike give
    one sum over the ranks that share them.
    """
    spread_alike: dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]] = {}
    for gradient in gradients:
        groups, own = (), gradient
        if isinstance(gradient, DTensor):
            mesh, own = gradient.device_mesh, gradient.to_local()
            groups = tuple(mesh.get_group(d) for d, p in enumerate(gradient.placements) if not p.is_replicate())
        spread_alike.setdefault(groups, []).append(own)
    norms = [_norm_over(groups, shards) for groups, shards in spread_alike.items()]
    return torch.linalg.vector_norm(torch.stack(norms)) if len(norms) > 1 else norms[0]


def _norm_over(groups: tuple[dist.ProcessGroup, ...], shards: list[torch.Tensor]) -> torch.Tensor:
    """The norm of tensors of which this rank has these shards and the ranks of the groups the others."""
    norm = torch.nn.utils.get_total_norm(shards)
    if not groups:
        return norm
    square = norm**2
    for group in groups:
        dist.all_reduce(square, group=group)
    return square.sqrt()


@torch.no_grad()
def clip_gradients(gradients: list[torch.Tensor], norm: torch.Tensor, max_norm: float) -> None:
    """Scale all gradients, shards of any meshes among them, so that their norm is max_norm where it was larger."""
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    own = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
    torch._foreach_mul_(own, scale.to(own[0].device))
