"""Devices, dtypes and memory figures."""

import gc
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import psutil
import torch

_DTYPES = {
    "fp64": torch.float64,
    "float64": torch.float64,
    "fp32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
}


def resolve_device(name: str = "auto", local_rank: int = 0) -> torch.device:
    """Return the torch device for a config value.

    Args:
        name: "cuda": the GPU of this rank. "cuda:1": GPU 1. "cpu". "auto": the GPU of this rank if there is one,
            otherwise the CPU.
        local_rank: rank of this process on its host.

    Raises:
        ValueError: if the GPU does not exist, with the reason.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    device_type, _, index = name.partition(":")
    if device_type != "cuda" or not (index == "" or index.isdigit()):
        raise ValueError(f"device: expected auto, cpu, cuda or cuda:N, found {name!r}")
    if not torch.cuda.is_available():
        reason = "this build of torch has no CUDA" if torch.version.cuda is None else "torch finds no usable NVIDIA GPU"
        raise ValueError(
            f"device {name!r} was requested, but {reason} (torch {torch.__version__}): use cpu or auto, "
            "or run `python -m verl.utils.env_check` to see what is missing"
        )
    gpu = int(index) if index else local_rank
    if gpu >= torch.cuda.device_count():
        raise ValueError(
            f"GPU {gpu} was requested, but this process sees {torch.cuda.device_count()}: "
            "reduce trainer.n_gpus_per_node or make more GPUs visible (CUDA_VISIBLE_DEVICES)"
        )
    return torch.device("cuda", gpu)


def resolve_dtype(name: str | torch.dtype, device: torch.device) -> torch.dtype:
    """The torch dtype for a config value: fp64, fp32, bf16, fp16, their long forms, or "auto": bfloat16 on a GPU with
    hardware support, otherwise float32. Raises ValueError for any other value."""
    if isinstance(name, torch.dtype):
        return name
    if name == "auto":
        if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0):
            return torch.bfloat16
        return torch.float32
    if name not in _DTYPES:
        raise ValueError(f"dtype: expected auto, {', '.join(_DTYPES)}, found {name!r}")
    return _DTYPES[name]


def peak_memory(device: torch.device) -> int:
    """Peak memory in bytes: allocated by torch on a GPU, resident in this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # KiB on Linux, bytes on macOS


def process_rss() -> int:
    """Resident memory of this process in bytes."""
    return psutil.Process().memory_info().rss


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Exclude what exists from garbage collection, which takes longer the more objects there are. Does nothing if the
    program has called `gc.freeze` itself."""
    if gc.get_freeze_count():
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


# ---- names of public verl -------------------------------------------------------------------------------------------


def get_device_name() -> str:
    """`cuda` if a GPU is available, otherwise `cpu`."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def get_device_id() -> int | str:
    """Index of the current GPU; `cpu` without one."""
    return torch.cuda.current_device() if torch.cuda.is_available() else "cpu"


def get_torch_device() -> ModuleType:
    """`torch.cuda` if a GPU is available, otherwise `torch.cpu`."""
    return torch.cuda if torch.cuda.is_available() else torch.cpu


def get_nccl_backend() -> str:
    """The backend of process groups: `nccl` with a GPU, otherwise `gloo`."""
    return "nccl" if torch.cuda.is_available() else "gloo"


def get_device_capability(device_id: int = 0) -> tuple[int | None, int | None]:
    """Compute capability (major, minor) of a GPU; (None, None) without one."""
    return torch.cuda.get_device_capability(device_id) if torch.cuda.is_available() else (None, None)


def get_visible_devices_keyword() -> str:
    """The variable that selects the devices of a process."""
    return "CUDA_VISIBLE_DEVICES"


def auto_set_device(config: Any) -> None:
    """Set `trainer.device` to cuda if there is a GPU, unless it is cpu."""
    if torch.cuda.is_available() and config.trainer.device != "cpu":
        config.trainer.device = "cuda"


def is_torch_npu_available(check_device: bool = True) -> bool:
    """False: devices are NVIDIA GPUs or the CPU."""
    return False


def __getattr__(name: str) -> bool:
    if name == "is_cuda_available":  # evaluated at use, not at import
        return torch.cuda.is_available()
    if name == "is_npu_available":
        return False
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
