"""AdamW, its learning-rate schedule and gradient clipping over parameters that may be sharded."""

import inspect
import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from verl.config import schema
from verl.engines.parallel import full_tensor


def make_optimizer(optim: schema.OptimConfig, module: torch.nn.Module, device: torch.device) -> torch.optim.AdamW:
    """Make AdamW over the trained parameters. Raises ValueError for an unknown argument."""
    arguments = {"lr": optim.lr, "betas": tuple(optim.betas), "weight_decay": optim.weight_decay}
    extra = optim.override_optimizer_config or {}
    accepted = set(inspect.signature(torch.optim.AdamW).parameters) - {"params", *arguments}
    if not set(extra) <= accepted:
        raise ValueError(
            f"override_optimizer_config: {sorted(set(extra) - accepted)} are not additional arguments of AdamW; "
            f"expected some of {sorted(accepted)} (lr, betas and weight_decay are separate keys)"
        )
    if device.type in ("cpu", "cuda") and "foreach" not in extra:
        arguments["fused"] = True
    return torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], **arguments | extra)


def lr_multiplier(optim: schema.OptimConfig, total_training_steps: int = -1) -> Callable[[int], float]:
    """The schedule: linear warm-up, then constant or cosine.

    Args:
        total_training_steps: length of the run, if the section does not set its own.

    Returns:
        training step -> factor on the learning rate.

    Raises:
        ValueError: a cosine schedule that ends within its warm-up.
    """
    total = optim.total_training_steps if optim.total_training_steps > 0 else total_training_steps
    warmup = optim.lr_warmup_steps if optim.lr_warmup_steps > 0 else max(0, int(optim.lr_warmup_steps_ratio * total))
    if optim.lr_scheduler_type == "cosine" and total <= warmup:
        raise ValueError(f"a cosine schedule needs more total steps ({total}) than warm-up steps ({warmup})")

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        if optim.lr_scheduler_type == "constant":
            return 1.0
        progress = min(1.0, (step - warmup) / (total - warmup))
        wave = 0.5 * (1 + math.cos(2 * math.pi * optim.num_cycles * progress))
        return optim.min_lr_ratio + (1 - optim.min_lr_ratio) * wave

    return factor


def gradient_norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    """The 2-norm of all gradients, including the shards of other ranks: a scalar, equal on every rank.

    Gradients may be on different meshes, which one reduction cannot span, so gradients with the same layout are reduced
    together.
    """
    by_groups: dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]] = {}
    for gradient in gradients:
        groups, local = (), gradient
        if isinstance(gradient, DTensor):
            mesh, local = gradient.device_mesh, gradient.to_local()
            groups = tuple(mesh.get_group(d) for d, p in enumerate(gradient.placements) if not p.is_replicate())
        by_groups.setdefault(groups, []).append(local)
    norms = [_norm_over(groups, shards) for groups, shards in by_groups.items()]
    return torch.linalg.vector_norm(torch.stack(norms)) if len(norms) > 1 else norms[0]


def _norm_over(groups: tuple[dist.ProcessGroup, ...], shards: list[torch.Tensor]) -> torch.Tensor:
    """The norm of sharded tensors: this rank has these shards, and the ranks of `groups` have the others."""
    norm = torch.nn.utils.get_total_norm(shards)
    if not groups:
        return norm
    square = norm**2
    for group in groups:
        dist.all_reduce(square, group=group)
    return square.sqrt()


@torch.no_grad()
def clip_gradients(gradients: list[torch.Tensor], norm: torch.Tensor, max_norm: float) -> None:
    """Scale all gradients in place so that their norm is at most `max_norm`. `norm`: as `gradient_norm` returns it."""
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    local = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
    torch._foreach_mul_(local, scale.to(local[0].device))


def check_change(parameters: list[torch.nn.Parameter], before: list[torch.Tensor]) -> None:
    """Raise RuntimeError if an update changed no parameter; a run that trains nothing would look normal otherwise."""
    if all(torch.equal(full_tensor(p.detach()), full_tensor(old)) for p, old in zip(parameters, before)):
        raise RuntimeError("an update with a gradient changed none of the trained parameters")
