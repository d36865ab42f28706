"""Checks of Python packages: installed, recent enough, and importable.

They are imported in a subprocess, so that a package that hangs or crashes does not affect this process.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from verl.engines.traits import built_in_strategies
from verl.rollout.traits import built_in_engines
from verl.utils.packages import Package, at_least, is_installed, version_of

#: seconds; imports of torch from a cold disk or a network file system take more than a minute
TIMEOUT = 180.0

# runs each snippet and reports after each, so that a crash can be attributed
_CHILD = """
import json, sys
for name, code in json.loads(sys.argv[1]).items():
    print(json.dumps({"name": name}), flush=True)
    scope = {"info": None}
    try:
        exec(code, scope)
        result = {"info": scope["info"]}
    except BaseException as error:
        lines = [line for line in str(error).splitlines() if line.strip()] or [""]
        result = {"error": f"{type(error).__name__}: {lines[0].strip()}"}
    print("\\n" + json.dumps({"name": name, **result}), flush=True)
"""


@dataclass(frozen=True)
class Probe:
    """Result of a snippet. error: None if it succeeded. info: the value of its variable `info`."""

    error: str | None = None
    info: Any = None


def run_probes(codes: Mapping[str, str], timeout: float = TIMEOUT) -> dict[str, Probe]:
    """Run snippets one after another in one subprocess with the same sys.path. Every name gets a result; those after a
    crash or the timeout are reported as not tried."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", _CHILD, json.dumps(dict(codes))]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
        encoding="utf-8",
        errors="replace",
    )
    try:
        output, _ = process.communicate(timeout=timeout)
        code = process.returncode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
        ending = f"the process {how}"
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        ending = f"timed out after {timeout:g} s"
    probes: dict[str, Probe] = {}
    started = None
    for line in output.splitlines():
        record = _record(line)
        if record is None:
            continue
        started = record["name"]
        if "error" in record or "info" in record:
            probes[started] = Probe(record.get("error"), record.get("info"))
    for name in codes:
        if name not in probes:
            probes[name] = Probe(ending if name == started else f"not tried: {started} failed before it ({ending})")
    return probes


def _record(line: str) -> dict[str, Any] | None:
    """Parse a line of the subprocess; None if a package printed it."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError:
        return None
    return record if isinstance(record, dict) and "name" in record else None


# ---- results --------------------------------------------------------------------------------------------------------

OK, FAULT, NOTE = "✓", "✗", "!"


@dataclass(frozen=True)
class Check:
    """The result for one component.

    Attributes:
        name: the component.
        state: ✓ works, ✗ broken or missing, ! works, with a remark.
        detail: its version, or what is wrong.
        fix: the command that fixes it.
        required: nothing can run without this component.
    """

    name: str
    state: str
    detail: str
    fix: str | None = None
    required: bool = False

    def __str__(self) -> str:
        line = f"[{self.state}] {self.name}: {self.detail}"
        return line if self.fix is None else f"{line}\n      -> {self.fix}"


@dataclass(frozen=True)
class EnvReport:
    """All checks; and for each mode None if it can run here, otherwise the reason why not."""

    checks: tuple[Check, ...]
    modes: dict[str, str | None]

    @property
    def ok(self) -> bool:
        """Whether all required components work."""
        return not any(check.required and check.state == FAULT for check in self.checks)

    def __getitem__(self, name: str) -> Check:
        """Return the check of this name. Raises KeyError if it does not apply to this machine."""
        return {check.name: check for check in self.checks}[name]


# ---- the packages ---------------------------------------------------------------------------------------------------

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
    """The interpreter. An older one cannot import this module."""
    return Check("Python", OK, ".".join(map(str, sys.version_info[:3])), required=True)


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
