"""Environment check: one line per component, the fix for each problem, and the modes that can run here.

    python -m verl.utils.env_check          exit status 1 if a required component is missing or broken
    verl.check_env()                        the same from Python

[✓] works   [✗] broken or missing   [!] works, with a remark. Packages are imported in a subprocess, since an installed
package may still fail to load; this process imports nothing heavy.
"""

import os
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.engines.traits import built_in_strategies
from verl.env_check import packages
from verl.env_check.packages import FAULT, NOTE, OK, Check, EnvReport, Probe
from verl.processes.isolation.program import isolation
from verl.rollout.traits import built_in_engines
from verl.utils.paths import resolved

GIB = 2**30

DISK_GIB = 10.0
SHARED_MEMORY_GIB = 1.0

__all__ = ["Check", "EnvReport", "check_env", "inspect_env"]

# ---- the machine ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cards:
    """The GPUs of the host as listed by the driver: name, memory.total and memory.used (MiB), driver_version."""

    rows: tuple[dict[str, str], ...] = ()
    problem: str | None = None  # the error of nvidia-smi


def nvidia_smi() -> Cards:
    """Query the driver. No rows and no problem if there is no nvidia-smi."""
    fields = ["name", "memory.total", "memory.used", "driver_version"]
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    if shutil.which(command[0]) is None:
        return Cards()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, encoding="utf-8", errors="replace")
    except subprocess.TimeoutExpired:
        return Cards(problem="nvidia-smi did not respond within 30 s")
    lines = (done.stdout or done.stderr).strip().splitlines()
    if done.returncode != 0:
        return Cards(problem=lines[0] if lines else f"nvidia-smi ended with status {done.returncode}")
    rows = [line.split(", ") for line in lines]
    if strange := [line for line, row in zip(lines, rows) if len(row) != len(fields)]:
        return Cards(problem=f"nvidia-smi printed {strange[0]!r}, expected {', '.join(fields)}")
    return Cards(tuple(dict(zip(fields, row)) for row in rows))


def check_gpus(torch_probe: Probe, host: Cards) -> list[Check]:
    """Compare the GPUs that the driver lists with those that torch can use. One that torch cannot use is an error: a
    run would silently fall back to the CPU."""
    torch_info = torch_probe.info or {"usable": False, "cuda": None, "reason": torch_probe.error or ""}
    visible = len(torch_info["capabilities"]) if torch_info["usable"] else 0
    if host.problem is not None and not visible:
        fix = "install the NVIDIA driver again and restart the host (in a container: start it with --gpus all)"
        return [Check("GPU", NOTE, f"the driver fails: {host.problem}", fix)]
    if not host.rows and not visible:
        return [Check("GPU", NOTE, "no NVIDIA GPU: everything runs on the CPU")]
    if not host.rows:  # torch queries the driver directly
        unseen = host.problem or "there is no nvidia-smi"
        seen = Check("GPU", OK, f"{visible} visible to torch, CUDA {torch_info['cuda']} ({unseen})")
        return [seen, *_check_gpu_details(torch_info, host)]
    cards = f"{len(host.rows)} x {host.rows[0]['name']}, driver {host.rows[0]['driver_version']}"
    reinstall = "pip install uv && uv pip install --reinstall --torch-backend=auto torch"
    if torch_info["cuda"] is None:
        return [Check("GPU", NOTE, f"{cards}; this torch is built for the CPU and does not use them", reinstall)]
    if not torch_info["usable"]:
        if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
            return [Check("GPU", NOTE, f"{cards}; hidden by CUDA_VISIBLE_DEVICES", "unset CUDA_VISIBLE_DEVICES")]
        fix = f"update the NVIDIA driver, or install a torch that supports it: {reinstall}"
        return [Check("GPU", FAULT, f"{cards}; torch cannot use them: {torch_info['reason']}", fix, required=True)]
    seen = Check("GPU", OK, f"{cards}; CUDA {torch_info['cuda']}, {visible} visible")
    return [seen, *_check_gpu_details(torch_info, host)]


def _check_gpu_details(torch_info: Mapping[str, Any], host: Cards) -> list[Check]:
    checks = []
    if any(tuple(capability) < (8, 0) for capability in torch_info["capabilities"]):
        checks.append(Check("bfloat16", NOTE, "no hardware support (needs Ampere or newer): float32 is used"))
    taken = [
        f"GPU {i}: {card['memory.used']} of {card['memory.total']} MiB"
        for i, card in enumerate(host.rows)
        if "N/A" not in card["memory.used"] + card["memory.total"]  # a GPU that shares the host's memory
        and float(card["memory.used"]) > 0.1 * float(card["memory.total"])
    ]
    if taken:
        usage = f"used by another program: {', '.join(taken)}"
        checks.append(Check("GPU memory", NOTE, usage, "nvidia-smi   # shows which program"))
    if torch_info["nccl"] is None:
        checks.append(Check("NCCL", FAULT, "not in this build of torch: single GPU only", "pip install -U torch"))
    else:
        checks.append(Check("NCCL", OK, torch_info["nccl"]))
    return checks


def check_disk(folder: Path = Path(".")) -> Check:
    """Free space for checkpoints in the default location."""
    free = shutil.disk_usage(folder).free / GIB
    space = f"{free:.1f} GiB free in {resolved(folder)}"
    if free >= DISK_GIB:
        return Check("disk", OK, space)
    fix = "trainer.default_local_dir=<a folder on a larger disk> and trainer.max_actor_ckpt_to_keep=1"
    return Check("disk", NOTE, f"{space}: a checkpoint of a 0.5B model with its optimizer takes 8 GiB", fix)


def check_shared_memory(folder: Path = Path("/dev/shm")) -> Check | None:
    """Size of /dev/shm, through which processes exchange batches (64 MiB in a container by default); None if absent."""
    if not folder.is_dir():
        return None
    total = shutil.disk_usage(folder).total / GIB
    if total >= SHARED_MEMORY_GIB:
        return Check("shared memory", OK, f"{total:.1f} GiB")
    fix = "docker run --shm-size=16g ...   # or: mount -o remount,size=16G /dev/shm"
    return Check("shared memory", NOTE, f"{total:.2f} GiB: too little for several processes (NCCL, Ray, loaders)", fix)


def check_interfaces(environment: Mapping[str, str] = os.environ) -> list[Check]:
    """The variables of network interfaces: prefixes for NCCL (`=`: exact names, `^`: all others), one name for Gloo."""
    present, checks = [name for _, name in socket.if_nameindex()], []
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        if value := environment.get(variable):
            names, whole = value.lstrip("^=").split(","), "=" in value[:2] or variable.startswith("GLOO")
            named = {i for i in present if (i in names if whole else i.startswith(tuple(names)))}
            usable = set(present) - named if value.startswith("^") else named
            text = f"{value} matches no network interface of this host ({', '.join(present)})"
            fix = f"unset {variable}   # each process then uses the interface that leads to rank 0"
            checks.append(Check(variable, OK, value) if usable else Check(variable, FAULT, text, fix))
    return checks


def check_isolation() -> Check:
    """How programs are isolated that the policy writes: for the reward `code` and the tool `python`."""
    mode = isolation()
    fix = None if mode.bubblewrap else "apt install bubblewrap   # and allow user namespaces: docs/security.md"
    return Check("programs", NOTE if mode.weaker else OK, f"isolated by {mode.describe()}", fix)


# ---- the check ------------------------------------------------------------------------------------------------------

#: mode -> checks that it needs
_MODES: dict[str, tuple[str, ...]] = {
    "local trainer, one process": (),
    "several processes on this host": ("FSDP2",),
    "Ray, one or many hosts": ("Ray", "FSDP2"),
    **{
        f"rollout.name={name}": () if traits.package is None else (traits.package.title,)
        for name, traits in built_in_engines().items()
    },
    **{
        f"strategy={name}": ("FSDP2",) if traits.package is None else (traits.package.title, "GPU")
        for name, traits in built_in_strategies().items()
    },
}


def check_env(verbose: bool = True) -> EnvReport:
    """Check this machine, print the results and return them.

    Args:
        verbose: False prints only problems and remarks.

    Raises:
        SystemExit: with status 1, after printing, if a required component is missing or broken. Components that only
            some modes need do not count. `inspect_env` neither prints nor exits.
    """
    report = inspect_env()
    for check in report.checks:
        if verbose or check.state != OK:
            print(check)
    if verbose:
        print("\nVersions tested together: " + ", ".join(f"{n} {v}" for n, v in packages.TESTED_TOGETHER.items()))
        print("\nSupported on this machine:")
        width = max(map(len, report.modes))
        for mode, reason in report.modes.items():
            print(f"  {mode:<{width}}  {'yes' if reason is None else f'no: {reason}'}")
    if not report.ok:
        raise SystemExit(1)
    return report


def inspect_env() -> EnvReport:
    """Check this machine. Takes a few seconds, mostly imports in subprocesses."""
    probes = packages.probe_packages()
    gpus = check_gpus(probes["torch"], nvidia_smi())
    checks = [
        packages.check_python(),
        *packages.check_core(probes),
        *gpus,
        packages.check_fsdp2(probes),
        packages.check_attention(probes, gpu=gpus[0].state == OK),
        *packages.check_optional(probes),
        check_disk(),
        check_shared_memory(),
        check_isolation(),
        *check_interfaces(),
    ]
    present = tuple(check for check in checks if check is not None)
    return EnvReport(present, possible_modes(present))


def possible_modes(checks: Sequence[Check]) -> dict[str, str | None]:
    """Return mode -> None if it can run, otherwise the reason why not."""
    states = {check.name: check.state for check in checks}
    broken = [check.name for check in checks if check.required and check.state == FAULT]
    modes: dict[str, str | None] = {}
    for mode, needs in _MODES.items():
        missing = [name for name in needs if states[name] != OK]
        modes[mode] = f"needs {' and '.join(missing)}" if missing else None
        if broken:
            modes[mode] = f"fix {', '.join(broken)} first"
    return modes
