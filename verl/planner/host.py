"""The device of this host: its name, and the profile that is used for it."""

import importlib.metadata
import os
import platform
import resource
from collections.abc import Iterator
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
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    versions |= {"cpu": _cpu_model(), "cores": str(os.cpu_count())}
    if device.type == "cuda":
        return versions | {"gpus": str(torch.cuda.device_count()), "cuda": str(torch.version.cuda)}
    return versions | {"memory": f"{host_memory() / GIB:.0f} GiB"}


def _cpu_model() -> str:
    """Such as "AMD EPYC 9B14"."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def host_memory() -> float:
    """Bytes of memory of the host, or of the smallest limit of the cgroups that this process is in."""
    limits = [float(psutil.virtual_memory().total)]
    for path in _limit_files(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")):
        text = path.read_text(encoding="utf-8").strip() if path.is_file() else "max"
        limits += [float(text)] if text.isdigit() else []
    return min(limits)


def _limit_files(groups: Path, root: Path) -> Iterator[Path]:
    """Files that may have the memory limit of a process: of its cgroups and of all above them.

    Args:
        groups: the file that lists its cgroups, such as "0::/a/b" (version 2) or "4:memory:/a/b" (version 1).
        root: where cgroups are mounted. In a container the cgroup of the container may be the root.
    """
    paths = {"": "/", "memory": "/"}
    for line in groups.read_text(encoding="utf-8").splitlines() if groups.is_file() else ():
        _, controllers, path = line.split(":", 2)
        if controllers == "" or "memory" in controllers.split(","):
            paths["memory" if controllers else ""] = path
    for kind, name in (("", "memory.max"), ("memory", "memory.limit_in_bytes")):
        folder = Path(paths[kind].strip("/"))
        for each in (folder, *folder.parents):
            yield root / kind / each / name


def process_limit() -> float:
    """Bytes that a process may allocate (`ulimit -d`); 0 without a limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_DATA)
    return 0.0 if soft == resource.RLIM_INFINITY else float(soft)


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
        process_limit=process_limit(),
        source="nominal rates of a CPU",
    )


def host_profile(name: str = "auto") -> Device:
    """The profile of the device of this host: calibrated, built in, or nominal. name: as `trainer.device`."""
    device = resolve_device(name)
    try:
        profile, why = calibrated(host_fingerprint(device), host_name(device))
    except ValueError as error:  # a damaged file, which must not keep a run from starting
        profile, why = None, str(error)
    base = base_profile(device)
    if profile is not None:
        return replace(profile, memory=base.memory, process_limit=base.process_limit)
    return replace(base, source=f"{base.source} ({why}; `verl plan --calibrate` measures it)")
