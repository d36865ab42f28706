"""Run megatron-core on a CPU with gloo, for tests: CUDA's devices become the CPU, its streams and events nothing.

`install()` in every process before an engine is made. A training run lists this file in `imports`, which each process
imports; importing it installs it.
"""

import functools
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._device import _device_constructors

from verl.engines.megatron import runtime

CPU = torch.device("cpu")
_FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn", "as_tensor", "zeros_like")
_FACTORIES += ("empty_like",)


def _on_cpu(device: Any) -> Any:
    is_cuda = (isinstance(device, str | torch.device) and str(device).startswith("cuda")) or isinstance(device, int)
    return CPU if is_cuda else device


def _without_cuda(function: Any) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        return function(*args, **kwargs)

    return call


class _Nothing:
    """A stream or event: every method does nothing."""

    def __init__(self, *_: Any, **__: Any):
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: _Nothing()  # a stream's record_event returns an event


def _allow_uneven_sizes() -> None:
    """Gather and scatter tensors of different lengths, as NCCL does and gloo does not."""
    gather, scatter = dist.all_gather, dist.reduce_scatter

    def all_gather(outputs: list[torch.Tensor], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        longest = max(len(each) for each in outputs)
        if all(len(each) == longest for each in outputs):
            return gather(outputs, tensor, *args, **kwargs)
        padded = [each.new_empty(longest, *each.shape[1:]) for each in outputs]
        own = tensor.new_empty(longest, *tensor.shape[1:])
        own[: len(tensor)] = tensor
        gather(padded, own, *args, **kwargs)
        for output, each in zip(outputs, padded):
            output.copy_(each[: len(output)])

    def reduce_scatter(output: torch.Tensor, inputs: list[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        if len({len(each) for each in inputs}) == 1:
            return scatter(output, inputs, *args, **kwargs)
        joined = torch.cat(inputs)
        dist.all_reduce(joined, **kwargs)
        output.copy_(joined.split([len(each) for each in inputs])[dist.get_rank(kwargs["group"])])

    dist.all_gather, dist.reduce_scatter = all_gather, reduce_scatter


def install() -> None:
    """Replace the functions. Idempotent.

    Raises:
        RuntimeError: the process has a GPU.
    """
    if torch.cuda.is_available():
        raise RuntimeError(
            "megatron_cpu/shim.py replaces functions of torch.cuda, which breaks all that uses CUDA in this process: "
            "expected a process without a GPU, found one: set CUDA_VISIBLE_DEVICES="
        )
    if "cpu" in runtime.DEVICE_TYPES:
        return
    runtime.DEVICE_TYPES.add("cpu")
    torch.compiler.set_stance("force_eager")  # megatron-core compiles small functions; that fails after what follows
    _device_constructors()  # cached: `with torch.device("meta")` must know the functions by their own identity
    for name in _FACTORIES:
        setattr(torch, name, _without_cuda(getattr(torch, name)))
    cuda = torch.cuda
    cuda.current_device = lambda: CPU
    for name in ("synchronize", "empty_cache", "set_device"):  # a function each: torch.compile has rules by function
        setattr(cuda, name, lambda *_, **__: None)
    cuda.Stream = cuda.Event = _Nothing
    cuda.current_stream = lambda *_, **__: _Nothing()
    cuda.default_stream = lambda *_, **__: _Nothing()
    cuda.stream = lambda *_, **__: nullcontext()
    cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.random.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    cuda.manual_seed = torch.manual_seed
    torch.Tensor.cuda = lambda self, *_, **__: self
    to = torch.Tensor.to
    torch.Tensor.to = lambda self, *args, **kw: to(
        self,
        *(_on_cpu(a) if isinstance(a, str) else a for a in args),
        **{k: _on_cpu(v) if k == "device" else v for k, v in kw.items()},
    )
    type_of = torch.Tensor.type  # the distributed optimizer compares names of types
    torch.Tensor.type = lambda self, *args, **kw: (
        type_of(self, *args, **kw) if args or kw else type_of(self).replace("torch.", "torch.cuda.", 1)
    )
    exchange = dist.all_to_all_single  # megatron-core makes lists of sizes only when it copies them from a GPU
    dist.all_to_all_single = lambda *args, **kw: exchange(
        *args, **{k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in kw.items()}
    )
    _allow_uneven_sizes()
    from megatron.core.tensor_parallel import random

    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)


install()
