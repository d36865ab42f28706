"""The device of this host: its name, and the profile that is used for it."""

import os
import platform
import resource
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import torch

from verl.planner.devices import GIB, Device, built_in, known_gpu


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


def host_profile(device: torch.device) -> Device:
    """The profile of a device of this host: of a GPU if it is known, and of a slow core otherwise."""
    if device.type == "cuda":
        name, total = torch.cuda.get_device_name(device), torch.cuda.get_device_properties(device).total_memory
        return replace(known_gpu(name) or built_in("A100"), name=name, memory=float(total))
    return Device(
        name=f"CPU ({platform.machine()}, {os.cpu_count()} cores), {torch.get_num_threads()} threads",
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
