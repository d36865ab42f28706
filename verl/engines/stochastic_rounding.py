"""Optimizer steps on bf16 weights whose results are rounded stochastically.

Rounded to nearest, an update of less than 0.2 % of a bf16 weight is lost, and so is the decay of Adam's second moment.
Rounded up or down with probabilities that make the expected value exact (Zamirai et al. 2020, arXiv 2010.06192), none
is lost on average.
"""

import torch
from torch.distributed.tensor import DTensor

from verl.utils.rng import fork_seed


@torch.no_grad()
def step_with_stochastic_rounding(optimizer: torch.optim.Optimizer) -> None:
    """`optimizer.step()` in float32, one parameter at a time, with new bf16 weights and moments rounded stochastically.

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
