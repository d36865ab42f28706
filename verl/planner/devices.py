"""What a device can do: built-in profiles of GPUs, and the profile of a device of this host."""

import os
import platform
import re
import resource
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch

from verl.registry import did_you_mean

GIB = 2**30


@dataclass(frozen=True)
class Device:
    """Rates of a device and its links, all in bytes, FLOPs and seconds.

    Attributes:
        name: as shown.
        kind: "cuda" or "cpu".
        memory: bytes of one device; of a CPU, the memory of the host.
        process_limit: bytes that one process may allocate (`ulimit -d`); 0: no limit.
        per_node: devices of a node.
        matmul: FLOP/s of the GEMMs of a decoder in the dtype of the computation.
        attention: FLOP/s of attention over long sequences with heads of 128; `attention_half` is the sequence length
            that reaches half of it.
        bandwidth: bytes/s of element-wise kernels.
        link: bytes/s that a device receives in a collective within a node.
        node_link: bytes/s that a node receives from others.
        latency: seconds of a small collective.
        layer_seconds: fixed seconds of one layer in a forward pass, whatever the tokens.
        decode_seconds: fixed seconds of one layer in a decoding step of the engine native.
        step_seconds: fixed seconds of a step outside of the models.
        update_seconds: fixed seconds of an update: checks of the weights, choice of the micro-batches.
        push_seconds: fixed seconds of a weight push to another process or engine.
        forward, backward, decode: corrections of the time of a pass, which benchmarks/planner.py measures on a CPU.
        sharded: factor of the time of a pass with FSDP2 over several devices, whose weights are neither cast once nor
            fused once per update.
        sharded_layer_seconds: fixed seconds of one layer in a pass with FSDP2 over several devices: its hooks.
        reserved: bytes that the process needs beside tensors: the CUDA context and communication buffers; on a CPU, the
            libraries and what the allocator keeps.
        peak: published FLOP/s of dense matmuls in 16 bits; 0 if not known.
        source: where the figures are from.
    """

    name: str
    kind: str
    memory: float
    per_node: int
    matmul: float
    attention: float
    attention_half: float
    bandwidth: float
    link: float
    node_link: float
    latency: float
    layer_seconds: float
    decode_seconds: float
    step_seconds: float
    push_seconds: float
    forward: float = 1.0
    backward: float = 1.0
    decode: float = 1.0
    sharded: float = 1.0
    sharded_layer_seconds: float = 0.0
    update_seconds: float = 0.0
    reserved: float = 0.0
    peak: float = 0.0
    process_limit: float = 0.0
    source: str = ""

    def available(self, devices: int) -> float:
        """Bytes of memory that one of `devices` processes may use. Those of a CPU share the memory of the host."""
        share = self.memory / (devices if self.kind == "cpu" else 1)
        return min(share, self.process_limit or share)

    def attention_rate(self, length: float, head_dim: int) -> float:
        """FLOP/s of attention over sequences of this length."""
        return self.attention * length / (length + self.attention_half) * min(1.0, (head_dim / 128) ** 0.66)

    def link_of(self, devices: int) -> float:
        """Bytes/s that each of `devices` neighboring devices receives in a collective over all of them."""
        return self.link if devices <= self.per_node else min(self.link, self.node_link)


# measured on H200s (benchmarks/results): GEMMs of an update 660 TFLOP/s (train_step_gpu.json), element-wise kernels
# 4.2 TB/s, attention 605 TFLOP/s at 16k tokens, all-gather 230 to 260 GB/s of 450 (weight_sync_h200.json), decoding
# steps (rollout_h200.jsonl), FSDP2 on two GPUs against one (engines_h200.json: 0.5B and 7B)
_H200 = Device(
    name="H200",
    kind="cuda",
    memory=139.8 * GIB,
    per_node=8,
    matmul=660e12,
    attention=706e12,
    attention_half=2730,
    bandwidth=4.2e12,
    link=240e9,
    node_link=320e9,
    latency=20e-6,
    layer_seconds=0.6e-3,
    decode_seconds=42e-6,
    step_seconds=0.1,
    push_seconds=0.1,
    sharded_layer_seconds=1.5e-3,
    update_seconds=0.025,
    reserved=1.5 * GIB,
    peak=989e12,
    source="measured on an H200, benchmarks/results",
)


def _scaled(name: str, memory: float, flops: float, bandwidth: float, link: float, node_link: float) -> Device:
    """A GPU whose published peak rates are these, with the efficiencies measured on an H200 (989 TFLOP/s, 4.8 TB/s, 450
    GB/s)."""
    compute = flops / 989e12
    return replace(
        _H200,
        name=name,
        memory=memory * GIB,
        peak=flops,
        matmul=_H200.matmul * compute,
        attention=_H200.attention * compute,
        bandwidth=_H200.bandwidth * bandwidth / 4.8e12,
        link=_H200.link * link / 450e9,
        node_link=node_link,
        source="published peak rates x efficiencies measured on an H200",
    )


BUILT_IN = {
    "B200": _scaled("B200", 179.0, 2250e12, 8e12, 900e9, 320e9),
    "H200": _H200,
    "H100": _scaled("H100", 79.1, 989e12, 3.35e12, 450e9, 320e9),
    "H800": _scaled("H800", 79.1, 989e12, 3.35e12, 200e9, 320e9),
    "H20": _scaled("H20", 95.6, 148e12, 4e12, 450e9, 320e9),
    "A100": _scaled("A100", 79.2, 312e12, 2.04e12, 300e9, 160e9),
    "A100-40GB": _scaled("A100-40GB", 39.4, 312e12, 1.555e12, 300e9, 160e9),
    "A800": _scaled("A800", 79.2, 312e12, 2.04e12, 200e9, 160e9),
    "L40S": _scaled("L40S", 44.7, 362e12, 0.864e12, 28e9, 40e9),
    "RTX-4090": _scaled("RTX-4090", 23.6, 165e12, 1.008e12, 22e9, 10e9),
}


def built_in(name: str) -> Device:
    """The built-in profile of this name. Raises ValueError if there is none."""
    profile = next((device for key, device in BUILT_IN.items() if key.lower() == name.lower()), known_gpu(name))
    if profile is None:
        raise ValueError(f"there is no profile of the GPU {name!r}: {did_you_mean(name, BUILT_IN)}")
    return profile


def known_gpu(name: str) -> Device | None:
    """The built-in profile that a device name such as "NVIDIA H200" or "NVIDIA A100-SXM4-40GB" belongs to. None if
    there is none, or several, as of "H100,H200"."""
    parts = set(re.split(r"[^A-Za-z0-9]+", name))
    matching = [key for key in BUILT_IN if set(key.split("-")) <= parts]
    best = max(matching, key=len, default="")
    return BUILT_IN[best] if best and all(set(key.split("-")) <= set(best.split("-")) for key in matching) else None


# ---- this host ------------------------------------------------------------------------------------------------------


def host_memory() -> float:
    """Bytes of memory of the host, or of the smallest limit of the cgroups that this process is in."""
    limits = [float(psutil.virtual_memory().total)]
    for path in _limit_files(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")):
        text = path.read_text(encoding="utf-8").strip() if path.is_file() else "max"
        limits += [float(text)] if text.isdigit() else []
    return min(limits)


def _limit_files(groups: Path, root: Path) -> Iterator[Path]:
    """Files that may have the memory limit of a process: of its cgroups, such as "0::/a/b" (version 2) or
    "4:memory:/a/b" (version 1) in the file `groups`, and of all above them. root: where cgroups are mounted; in a
    container its own may be the root."""
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
        name=f"CPU ({platform.machine()}, {os.cpu_count()} cores), threads: {torch.get_num_threads()}",
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
        step_seconds=0.02,
        push_seconds=0.02,
        sharded=1.5,
        reserved=0.5 * GIB,
        process_limit=process_limit(),
        source="nominal rates of a CPU",
    )
