"""Layers whose computation is adapted while the engine generates.

- Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) caches one latent vector per token, from which the modules
  compute the keys and values of all heads. For a decoding step, the projections to keys and from values are applied to
  the query and to the output instead, so that attention reads the latents themselves.
- The scan of Mamba-2 layers clamps its step sizes, but their decoding step does not: the input is clamped for both.
- On a GPU, a step of the gated delta rule is one kernel.
"""

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec

import torch
from torch import nn


def has_latents(module: nn.Module) -> bool:
    """Whether a module is latent attention whose projections can be moved from the keys and values."""
    return hasattr(module, "expand_kv") and type(module.kv_b_proj) is nn.Linear and module.kv_b_proj.bias is None


def _projections(module: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """(HQ, N, R) from latents to keys, and (HQ, DV, R) from latents to values."""
    sizes = module.qk_nope_head_dim, module.v_head_dim
    weight = module.kv_b_proj.weight
    return weight.view(-1, sum(sizes), weight.shape[1]).split(sizes, 1)


def latent_query(module: nn.Module, query: torch.Tensor) -> torch.Tensor:
    """query (b, HQ, Q, N + rotated) -> (b, HQ, Q, R + rotated), for keys that are latents (R) and rotated keys."""
    to_keys, size = _projections(module)[0], module.qk_nope_head_dim
    plain, rotated = query[..., :size], query[..., size:]
    return torch.cat((torch.einsum("bhqn,hnr->bhqr", plain, to_keys.to(plain.dtype)), rotated), -1)


def values_of_latents(module: nn.Module, attended: torch.Tensor) -> torch.Tensor:
    """Attention over latents (b, HQ, Q, R) -> (b, HQ, Q, DV)."""
    return torch.einsum("bhqr,hvr->bhqv", attended, _projections(module)[1].to(attended.dtype))


def _clamps(module: nn.Module) -> bool:
    low, high = getattr(module, "time_step_limit", None) or (0.0, math.inf)
    return low > 0 or high < math.inf


def _clamp_steps(module: nn.Module, _: nn.Module, inputs: tuple, output: torch.Tensor) -> torch.Tensor:
    """Clamp the last columns of a projection, from which the step sizes are softplus(column + bias)."""
    low, high = (
        -math.inf if limit == 0 else limit if limit == math.inf else limit + math.log(-math.expm1(-limit))
        for limit in module.time_step_limit
    )
    rest, steps = output.split((output.shape[-1] - len(module.dt_bias), len(module.dt_bias)), -1)
    bias = module.dt_bias.float()
    return torch.cat((rest, steps.float().clamp(low - bias, high - bias).to(output.dtype)), -1)


@contextmanager
def _delta_rule_kernel(model: nn.Module) -> Iterator[None]:
    """Context in which decoding steps of the gated delta rule are one kernel, if the package fla has none."""
    name, homes = (
        "torch_recurrent_gated_delta_rule",
        {sys.modules[type(module).__module__] for module in model.modules()},
    )
    homes = [home for home in homes if hasattr(home, name)]
    if not homes or model.device.type != "cuda" or find_spec("fla") is not None:
        yield
        return
    from verl.rollout.native.generic.kernels import delta_rule_step

    plain = [getattr(home, name) for home in homes]
    for home, function in zip(homes, plain):
        setattr(home, name, partial(delta_rule_step, function))
    try:
        yield
    finally:
        for home, function in zip(homes, plain):
            setattr(home, name, function)


@contextmanager
def adapted(model: nn.Module, expand) -> Iterator[None]:
    """Context in which the layers of a model are adapted.

    Args:
        expand: called with a latent attention module, its latents and its rotated keys instead of its `expand_kv`.
    """
    latent = [module for module in model.modules() if has_latents(module)]
    hooks = [m.in_proj.register_forward_hook(partial(_clamp_steps, m)) for m in model.modules() if _clamps(m)]
    for module in latent:
        module.expand_kv = partial(expand, module)
    try:
        with _delta_rule_kernel(model):
            yield
    finally:
        for module in latent:
            del module.expand_kv
        for hook in hooks:
            hook.remove()
