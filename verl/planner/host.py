"""The device of this host: its name, and the profile that is used for it."""

import importlib.metadata
import os
import platform
from dataclasses import replace
from pathlib import Path

import psutil
import torch

from verl.planner.devices import GIB, Device, built_in, calibrated, known_gpu
from verl.utils.device import resolve_device


def host_name(device: torch.device) -> str:
    """The name of the device in a profile."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU ({platform.machine()}, {os.cpu_count()} cores), {torch.get_num_threads()} threads"


def host_fingerprint(device: torch.device) -> dict[str, str]:
    """What a calibration depends on: hardware, threads and packages."""
    found = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    found |= {"cpu": _cpu_model(), "cores": str(os.cpu_count())}
    if device.type == "cuda":
        return found | {"gpus": str(torch.cuda.device_count()), "cuda": str(torch.version.cuda)}
    return found | {"memory": f"{host_memory() / GIB:.0f} GiB"}


def _cpu_model() -> str:
    """Such as "AMD EPYC 9B14"."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def host_memory() -> float:
    """Bytes of memory of the host, or of the limit of its container."""
    limits = [float(psutil.virtual_memory().total)]
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # versions 2 and 1 of cgroups
        path = Path("/sys/fs/cgroup") / name
        text = path.read_text().strip() if path.is_file() else "max"
        limits += [float(text)] if text.isdigit() else []
    return min(limits)


def base_profile(device: torch.device) -> Device:
    """The profile that measured rates replace: of the GPU if it is known, and of a slow core otherwise."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        known = known_gpu(host_name(device)) or built_in("A100")
        return replace(known, name=host_name(device), memory=float(total))
    return Device(
        name=host_name(device),
        kind="cpu",
        memory=host_memory(),
        per_node=os.cpu_count() or 1,
        matmul=50e9,
        attention=25e9,
        attention_half=0.0,
        bandwidth=8e9,
        link=1e9,
        node_link=1e9,
        latency=200e-6,
        layer_seconds=400e-6,
        decode_seconds=100e-6,
        decode_row_seconds=0.0,
        step_seconds=0.02,
        push_seconds=0.02,
        sharded=1.5,
        reserved=0.5 * GIB,
        source="nominal rates of a CPU",
    )


def host_profile(name: str = "auto") -> Device:
    """The profile of the device of this host: calibrated, built in, or nominal. name: as `trainer.device`."""
    device = resolve_device(name)
    try:
        found, why = calibrated(host_fingerprint(device), host_name(device))
    except ValueError as error:  # a damaged file, which must not keep a run from starting
        found, why = None, str(error)
    if found is not None:
        return replace(found, memory=base_profile(device).memory)
    base = base_profile(device)
    return replace(base, source=f"{base.source} ({why}; `verl plan --calibrate` measures it)")
