"""Let a `MegatronEngine` compute in float64, for tests on a CPU.

strategy=megatron supports float32 and bfloat16. In float64 rounding explains differences of up to 1e-12, so what is
left is a difference in what is computed. `install()` in every process before an engine with dtype fp64 is made; engines
with other dtypes compute as before.
"""

from collections.abc import Callable
from typing import Any

import torch

_WIDE = torch.float64


def _keeps_float64(softmax: Callable) -> Callable:
    """A softmax that ignores a smaller dtype."""

    def call(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return softmax(x, dim, dtype=_WIDE if x.dtype == _WIDE else dtype)

    return call


def install() -> None:
    """Replace what rounds to float32. Idempotent."""
    from tests.engines.megatron_cpu import shim  # its import replaces functions

    shim.install()
    from megatron.core.optimizer import clip_grads

    from verl.engines.megatron import engine

    if getattr(engine, "float64_for_tests", False):
        return
    engine.float64_for_tests = True
    narrow, type_of = torch.Tensor.float, torch.Tensor.type
    torch.Tensor.float = lambda self, *args, **kw: self if self.dtype == _WIDE else narrow(self, *args, **kw)
    torch.Tensor.type = lambda self, *args, **kw: (  # the optimizer knows names of 16 and 32 bits
        type_of(self, *args, **kw) if args or kw else type_of(self).replace("Double", "Float")
    )
    torch.softmax, torch.Tensor.softmax = _keeps_float64(torch.softmax), _keeps_float64(torch.Tensor.softmax)
    apply = clip_grads.multi_tensor_applier  # its norm is float32

    def apply_wide(function: Any, overflow: Any, lists: list[list[torch.Tensor]], *rest: Any) -> Any:
        if lists[0][0].dtype != _WIDE:
            return apply(function, overflow, lists, *rest)
        return torch.stack([x.square().sum() for x in lists[0]]).sum().sqrt()[None], None

    clip_grads.multi_tensor_applier = apply_wide
    check, config = engine._check_settings, engine.DistributedDataParallelConfig
    engine._check_settings = lambda spec: None if spec.engine.dtype == "fp64" else check(spec)
    # of float32 parameters, the gradients are float32 then too
    engine.DistributedDataParallelConfig = lambda **keys: config(**keys | {"grad_reduce_in_fp32": False})
