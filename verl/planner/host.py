"""The device of this host: its name, and the profile that is used for it."""

import importlib.metadata
import os
import platform
from dataclasses import replace

import psutil
import torch

from verl.planner.devices import Device, built_in, calibrated, known_gpu
from verl.utils.device import resolve_device


def host_name(device: torch.device) -> str:
    """The name of the device in a profile."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU ({platform.machine()}, {os.cpu_count()} cores), {torch.get_num_threads()} threads"


def host_versions() -> dict[str, str]:
    """The packages that a calibration depends on."""
    return {name: importlib.metadata.version(name) for name in ("torch", "transformers")}


def base_profile(device: torch.device) -> Device:
    """The profile that measured rates replace: of the GPU if it is known, and of a slow core otherwise."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        known = known_gpu(host_name(device)) or built_in("A100")
        return replace(known, name=host_name(device), memory=float(total))
    return Device(
        name=host_name(device),
        kind="cpu",
        memory=float(psutil.virtual_memory().total),
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
        source="not calibrated: nominal rates",
    )


def host_profile(name: str = "auto") -> Device:
    """The profile of the device of this host: calibrated, built in, or nominal. name: as `trainer.device`."""
    device = resolve_device(name)
    found, _ = calibrated(host_versions(), host_name(device))
    return found if found is not None else base_profile(device)
