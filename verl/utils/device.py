"""Which device and which number format to use, and how much memory is in use."""

import resource
import sys

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

_GIB = 1 << 30


def resolve_device(name: str = "auto", local_rank: int = 0) -> torch.device:
    """The device that a word of the configuration means, for process `local_rank` of this host.

    "cuda": the GPU of this rank. "cuda:1": GPU 1. "cpu": the CPU. "auto": the GPU of this rank where there is one,
    the CPU elsewhere.
    Raises ValueError when a GPU is asked for that is not there, with the reason.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    kind, _, index = name.partition(":")
    if kind != "cuda" or not (index == "" or index.isdigit()):
        raise ValueError(f"device {name!r} is unknown: expected auto, cpu, cuda or cuda:N")
    if not torch.cuda.is_available():
        reason = "this build of torch has no CUDA" if torch.version.cuda is None else "torch finds no usable NVIDIA GPU"
        raise ValueError(
            f"device {name!r} was asked for, but {reason} (torch {torch.__version__}): use cpu or auto, "
            "or see `python -m verl.utils.env_check` for what is missing"
        )
    chosen = int(index) if index else local_rank
    if chosen >= torch.cuda.device_count():
        raise ValueError(
            f"GPU {chosen} was asked for, but this process sees {torch.cuda.device_count()}: "
            "start fewer processes per node (trainer.n_gpus_per_node) or show it more GPUs (CUDA_VISIBLE_DEVICES)"
        )
    return torch.device("cuda", chosen)


def resolve_dtype(name: str | torch.dtype, device: torch.device) -> torch.dtype:
    """The torch dtype that a word means: fp64, fp32, bf16, fp16, their long forms, or "auto".

    "auto": bfloat16 on a GPU that has it in hardware, otherwise float32. Raises ValueError for another word.
    """
    if isinstance(name, torch.dtype):
        return name
    if name == "auto":
        if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0):
            return torch.bfloat16
        return torch.float32
    if name not in _DTYPES:
        raise ValueError(f"dtype {name!r} is unknown: expected auto, {', '.join(_DTYPES)}")
    return _DTYPES[name]


def peak_memory(device: torch.device) -> int:
    """Most bytes in use at once so far: allocated by torch on a GPU; resident in this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB, macOS in bytes


def process_rss() -> int:
    """Bytes of main memory that this process holds now."""
    return psutil.Process().memory_info().rss


def memory_metrics(device: torch.device) -> dict[str, float]:
    """What a training step logs about memory, in GiB: host memory of this process, and the GPU's peaks on a GPU."""
    metrics = {"perf/cpu_memory_used_gb": process_rss() / _GIB}
    if device.type == "cuda":
        metrics["perf/max_memory_allocated_gb"] = torch.cuda.max_memory_allocated(device) / _GIB
        metrics["perf/max_memory_reserved_gb"] = torch.cuda.max_memory_reserved(device) / _GIB
    return metrics
