"""AdamW, its learning-rate schedule, gradient clipping and stochastic rounding, of parameters that may be sharded.

`AdamW8bit` keeps its moments in 8 bits with a scale for each block (Dettmers et al. 2022, arXiv 2110.02861): a quarter
of the memory. A block is a section of a row, which FSDP does not cut, so a run resumes on any number of ranks.
"""

import inspect
import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from verl.config import schema
from verl.engines.parallel import full_tensor
from verl.utils.rng import fork_seed

#: elements of a row whose moments share a scale; rows of a matrix that are updated at a time have _CHUNK elements
_BLOCK, _CHUNK = 256, 2**24
_CODES, _LEAST = torch.float8_e4m3fn, 2.0**-9


def make_optimizer(optim: schema.OptimConfig, module: torch.nn.Module, device: torch.device) -> torch.optim.Optimizer:
    """Make the optimizer of the trained parameters. Raises ValueError for an unknown argument."""
    cls = {"AdamW": torch.optim.AdamW, "AdamW8bit": AdamW8bit}[optim.optimizer]
    arguments = {"lr": optim.lr, "betas": tuple(optim.betas), "weight_decay": optim.weight_decay}
    extra = optim.override_optimizer_config or {}
    accepted = set(inspect.signature(cls).parameters) - {"params", *arguments}
    if not set(extra) <= accepted:
        raise ValueError(
            f"override_optimizer_config: {sorted(set(extra) - accepted)} are not additional arguments of "
            f"{cls.__name__}; expected some of {sorted(accepted)} (lr, betas and weight_decay are separate keys)"
        )
    if "fused" in accepted and device.type in ("cpu", "cuda") and "foreach" not in extra:
        arguments["fused"] = True
    return cls([p for p in module.parameters() if p.requires_grad], **arguments | extra)


class AdamW8bit(torch.optim.Optimizer):
    """AdamW whose moments are float8 (e4m3) codes with one float32 scale per block, computed in float32.

    Of the second moment, the square root is stored, which halves its range. Vectors keep float32 moments: they are few,
    and FSDP cuts them anywhere.
    """

    def __init__(self, params, lr: float, betas=(0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.01):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def initialize(self, parameter: torch.Tensor) -> None:
        """Set the state of a parameter to zeros. Raises ValueError for columns that are sharded."""
        columns = parameter.shape[-1] if parameter.ndim > 1 else 0
        if isinstance(parameter, DTensor) and any(isinstance(p, Shard) and p.dim for p in parameter.placements):
            raise ValueError("optim.optimizer=AdamW8bit: not supported with tensor_parallel_size > 1: use AdamW")
        state = self.state[parameter]
        state["step"] = torch.zeros(())
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = torch.zeros_like(parameter, dtype=torch.uint8 if columns else torch.float32)
            if columns:
                blocks = parameter[..., : -(-columns // _BLOCK)]
                state[f"{name}_scale"] = torch.zeros_like(blocks, dtype=torch.float32).contiguous()

    def load_state_dict(self, state_dict: dict) -> None:
        """Restore the state without torch's cast to the dtype of the parameter."""
        super().load_state_dict(state_dict | {"state": {}})
        parameters = (p for group in self.param_groups for p in group["params"])
        numbers = (number for group in state_dict["param_groups"] for number in group["params"])
        for parameter, number in zip(parameters, numbers, strict=True):
            if number in state_dict["state"]:
                self.state[parameter] = dict(state_dict["state"][number])

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                if not self.state[parameter]:
                    self.initialize(parameter)
                state = self.state[parameter]
                state["step"] += 1
                tensors = [parameter, parameter.grad, *(value for name, value in state.items() if name != "step")]
                tensors = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
                if parameter.ndim < 2:
                    _adamw(*tensors, group, state["step"].item())
                    continue
                rows = max(1, _CHUNK // parameter.shape[-1])
                for chunk in zip(*(t.flatten(0, -2).split(rows) for t in tensors), strict=True):
                    _adamw_8bit(*chunk, group, state["step"].item())


def _adamw(parameter, gradient, mean, square, group: dict, step: float) -> None:
    """One step of AdamW, in place."""
    beta1, beta2 = group["betas"]
    gradient = gradient.float()
    mean.lerp_(gradient, 1 - beta1)
    square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    root = square.sqrt().div_(math.sqrt(1 - beta2**step)).add_(group["eps"])
    update = parameter.float().mul_(1 - group["lr"] * group["weight_decay"])
    parameter.copy_(update.addcdiv_(mean, root, value=-group["lr"] / (1 - beta1**step)))


def _adamw_8bit(parameter, gradient, mean, mean_scale, root, root_scale, group: dict, step: float) -> None:
    """`_adamw` of rows (R, C) with the codes (R, C) and scales (R, blocks) of mean and of the root of the square."""
    means, squares = _decode(mean, mean_scale), _decode(root, root_scale).square_()
    _adamw(parameter, gradient, means, squares, group, step)
    _encode(means, mean, mean_scale)
    # rounding to 0 would make the update huge
    _encode(squares.sqrt_(), root, root_scale, _LEAST)


def _decode(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    columns = codes.shape[-1]
    return codes.view(_CODES).float().mul_(scale.repeat_interleave(min(_BLOCK, columns), -1)[:, :columns])


def _encode(values: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, least: float = -math.inf) -> None:
    """Write values (R, C) as codes. least: the smallest code."""
    columns = values.shape[-1]
    padded = torch.nn.functional.pad(values, (0, -columns % min(_BLOCK, columns)))
    blocks = padded.unflatten(-1, (scale.shape[-1], -1))
    scale.copy_(blocks.abs().amax(-1) / torch.finfo(_CODES).max)
    divided = blocks / scale.clamp_min(torch.finfo(torch.float32).tiny)[..., None]
    codes.copy_(divided.clamp_(least).flatten(-2)[:, :columns].to(_CODES).view(torch.uint8))


def lr_multiplier(optim: schema.OptimConfig, total_training_steps: int = -1) -> Callable[[int], float]:
    """The schedule: linear warm-up, then constant, cosine, linear, or wsd: constant, with a linear decay at the end.

    Args:
        total_training_steps: length of the run, if the section does not set its own.

    Returns:
        training step -> factor on the learning rate.

    Raises:
        ValueError: a schedule whose decay starts within its warm-up.
    """
    total = optim.total_training_steps if optim.total_training_steps > 0 else total_training_steps
    warmup = optim.lr_warmup_steps if optim.lr_warmup_steps > 0 else max(0, int(optim.lr_warmup_steps_ratio * total))
    name, init = optim.lr_scheduler_type, optim.lr_warmup_init_ratio
    start = total - max(1, round(optim.lr_decay_steps_ratio * total)) if name == "wsd" else warmup
    if name != "constant" and not warmup <= start < total:
        raise ValueError(
            f"a {name} schedule needs more total steps ({total}) than warm-up steps ({warmup})"
            + (f" and steps of decay ({total - start})" if name == "wsd" else "")
        )

    def factor(step: int) -> float:
        if step < warmup:
            return init + (1 - init) * (step + 1) / (warmup + 1)
        if name == "constant":
            return 1.0
        progress = min(1.0, max(0, step - start) / (total - start))
        rest = 0.5 * (1 + math.cos(2 * math.pi * optim.num_cycles * progress)) if name == "cosine" else 1 - progress
        return optim.min_lr_ratio + (1 - optim.min_lr_ratio) * rest

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


# ---- stochastic rounding --------------------------------------------------------------------------------------------


@torch.no_grad()
def step_with_stochastic_rounding(optimizer: torch.optim.Optimizer) -> None:
    """`optimizer.step()` in float32, one parameter at a time, with new bf16 weights and moments rounded stochastically.

    Rounded to nearest, an update of less than 0.2 % of a bf16 weight is lost, and so is the decay of Adam's second
    moment. Rounded up or down with probabilities that make the expected value exact (Zamirai et al. 2020, arXiv
    2010.06192), none is lost on average.

    The random numbers depend on the index of the parameter and the number of steps, so a resumed run draws the same
    ones, and so do ranks with a copy of the same shard.
    """
    groups, step = optimizer.param_groups, -1
    parameters = [(group, p) for group in groups for p in group["params"] if p.grad is not None]
    try:
        for index, (group, parameter) in enumerate(parameters):
            wide = torch.nn.Parameter(parameter.float())
            wide.grad = parameter.grad.float()
            state = optimizer.state.pop(parameter, {})
            optimizer.state[wide] = {n: v.float() if v.dtype == torch.bfloat16 else v for n, v in state.items()}
            optimizer.param_groups = [{**group, "params": [wide]}]
            optimizer.step()
            state = optimizer.state.pop(wide)
            step = int(state["step"]) if step < 0 else step  # once: it may synchronize with the device
            generator = torch.Generator(parameter.device)
            generator.manual_seed(fork_seed("rounding", index, step))
            for name, value in state.items():
                if value.shape == parameter.shape and value.dim():
                    state[name] = round_stochastically(value, generator)
            optimizer.state[parameter] = state
            parameter.copy_(round_stochastically(wide, generator))
    finally:
        optimizer.param_groups = groups


def round_stochastically(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Round float32 values to bf16, up or down with the probability of the distance to the other neighbor."""
    if isinstance(values, DTensor):
        local = round_stochastically(values.to_local(), generator)
        return DTensor.from_local(
            local, values.device_mesh, values.placements, run_check=False, shape=values.shape, stride=values.stride()
        )
    bits = values.detach().contiguous().view(torch.int32)
    noise = torch.randint(0, 2**16, bits.shape, generator=generator, dtype=torch.int32, device=bits.device)
    return (bits + noise).bitwise_and_(-(2**16)).view(torch.float32).to(torch.bfloat16)
