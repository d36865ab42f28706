"""Checks of Python packages: installed, recent enough, and importable."""

import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from verl.engines.traits import built_in_strategies
from verl.env_check.probe import FAULT, NOTE, OK, Check, Probe, at_least, run_probes, version_of
from verl.rollout.traits import built_in_engines
from verl.utils.packages import Package, is_installed

PYTHON = "3.11"

#: module -> (distribution, minimum version) of required packages, as in pyproject.toml
CORE = {
    "torch": ("torch", "2.11"),
    "transformers": ("transformers", "5.0"),
    "tensordict": ("tensordict", "0.12"),
    "numpy": ("numpy", "1.26"),
    "pyarrow": ("pyarrow", "15"),
    "omegaconf": ("omegaconf", "2.3"),
    "pydantic": ("pydantic", "2.7"),
    "rich": ("rich", "13"),
    "typer": ("typer", "0.20"),
    "safetensors": ("safetensors", "0.4"),
    "math_verify": ("math-verify", "0.8"),
    "psutil": ("psutil", "5.9"),
}

#: versions that were tested together
TESTED_TOGETHER = {
    "Python": "3.11",
    "torch": "2.13.0",
    "transformers": "5.24.0",
    "tensordict": "0.15.3",
    "ray": "2.60.0",
    "peft": "0.21.2",
}

_TORCH = """
import warnings
import torch, torch.distributed as dist
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    usable = torch.cuda.is_available()
if usable:
    ones = torch.ones(64, 64, device="cuda")
    assert ones.matmul(ones).sum().item() == 64**3, "a GPU computed a wrong matmul"
info = {
    "cuda": torch.version.cuda,
    "usable": usable,
    "reason": str(caught[0].message).splitlines()[0] if caught else "",
    "capabilities": [torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())] if usable else [],
    "nccl": ".".join(map(str, torch.cuda.nccl.version())) if usable and dist.is_nccl_available() else None,
}
"""

# all in one process, since each import of torch takes a second
_CORE_PROBES = {
    "torch": _TORCH,
    "fsdp2": "import torch.distributed as dist\nfrom torch.distributed.fsdp import fully_shard\n"
    "assert dist.is_gloo_available() or dist.is_nccl_available(), 'this torch has neither gloo nor NCCL'",
    "varlen": "from torch.nn.attention.varlen import varlen_attn",
    **{module: f"import {module}" for module in CORE if module not in ("torch", "transformers")},
    "transformers": "from transformers import AutoModelForCausalLM, AutoTokenizer",
}


OPTIONAL = (
    Package("Ray", "ray", ("ray",), "from ray import init, remote"),
    *(
        traits.package
        for traits in (*built_in_engines().values(), *built_in_strategies().values())
        if traits.package is not None
    ),
)


def probe_packages() -> dict[str, Probe]:
    """Probe all installed packages, by module; "fsdp2" and "varlen" are features of torch."""
    jobs = [_CORE_PROBES]
    jobs += [{package.module: package.probe} for package in OPTIONAL if is_installed(package.module)]
    if is_installed("torchvision"):
        jobs.append({"torchvision": "import torchvision"})
    with ThreadPoolExecutor(len(jobs)) as pool:
        return {name: probe for probes in pool.map(run_probes, jobs) for name, probe in probes.items()}


def check_python() -> Check:
    """The interpreter."""
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info >= tuple(map(int, PYTHON.split("."))):
        return Check("Python", OK, version, required=True)
    fix = f"uv python install 3.12, or another Python >= {PYTHON}; then recreate the environment"
    return Check("Python", FAULT, f"{version}, requires {PYTHON} or newer", fix, required=True)


def check_core(probes: Mapping[str, Probe]) -> list[Check]:
    """torch and transformers, and one line for the other required packages, or one per broken package."""
    checks = [_check_core_package(module, probes[module]) for module in CORE]
    leading, others = checks[:2], checks[2:]
    faults = [check for check in others if check.state != OK]
    if faults:
        return leading + faults
    versions = ", ".join(f"{check.name} {check.detail}" for check in others)
    return [*leading, Check("other packages", OK, versions, required=True)]


def _check_core_package(module: str, probe: Probe) -> Check:
    distribution, minimum = CORE[module]
    version = version_of(distribution)
    install = f"pip install '{distribution}>={minimum}'"
    if version is None:
        return Check(distribution, FAULT, "not installed", install, required=True)
    if not at_least(version, minimum):
        return Check(distribution, FAULT, f"{version}, requires {minimum} or newer", f"{install} -U", required=True)
    if probe.error is not None:
        fix = f"pip install --force-reinstall --no-deps {distribution}=={version}"
        return Check(
            distribution, FAULT, f"{version} is installed but does not import: {probe.error}", fix, required=True
        )
    return Check(distribution, OK, version, required=True)


def check_fsdp2(probes: Mapping[str, Probe]) -> Check:
    """Sharding with torch's fully_shard."""
    if probes["fsdp2"].error is not None:
        return Check("FSDP2", FAULT, probes["fsdp2"].error, f"pip install -U 'torch>={CORE['torch'][1]}'")
    return Check("FSDP2", OK, "torch.distributed.fsdp.fully_shard")


def check_attention(probes: Mapping[str, Probe], gpu: bool) -> Check:
    """Attention over packed sequences: torch's varlen_attn on a GPU."""
    name = "packed attention"
    if probes["torch"].error is not None:
        return Check(name, FAULT, "needs torch")
    if not gpu:
        return Check(name, OK, "block masks (variable-length kernels need a GPU)")
    if probes["varlen"].error is None:
        return Check(name, OK, "torch varlen_attn")
    return Check(name, NOTE, "this torch has no varlen_attn: block masks, slower", "pip install -U torch")


def check_optional(probes: Mapping[str, Probe]) -> list[Check]:
    """Packages that some modes need: installed, broken, or not installed (which is not an error)."""
    checks = [_check_package(package, probes) for package in OPTIONAL]
    # only videos need torchvision, but transformers imports it if installed, and fails if that fails
    if "torchvision" in probes and probes["torchvision"].error is not None:
        state = f"{version_of('torchvision')} does not match this torch: {probes['torchvision'].error}"
        checks.append(Check("torchvision", FAULT, state, "pip uninstall -y torchvision   # only videos need it"))
    return checks


def _check_package(package: Package, probes: Mapping[str, Probe]) -> Check:
    install = f"{package.install_command}{_remarks(package)}"
    if package.module not in probes:
        return Check(package.title, NOTE, "not installed (optional)", install)
    version = version_of(*package.distributions) or "an unversioned copy"
    error = probes[package.module].error
    if error is not None:
        state = f"{version} is installed but does not import: {error}"
        return Check(package.title, FAULT, state, f"pip uninstall -y {package.distributions[0]}; {install}")
    return Check(package.title, OK, version)


def _remarks(package: Package) -> str:
    """A shell comment behind the command that installs a package."""
    remarks = {
        "in a clone": package.extra,
        "installs its own torch: use a separate environment": package.own_torch,
        f"tested: {package.tested_versions}": package.tested,
        f"on a CPU: {package.on_cpu}": package.on_cpu,
    }
    text = "; ".join(remark for remark, applies in remarks.items() if applies)
    return f"   # {text}" if text else ""
