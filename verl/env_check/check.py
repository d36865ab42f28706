"""What this machine can run: one line per part, the command that mends each fault, and the modes that are possible.

    python -m verl.utils.env_check          exit status 1 when a part is missing that every run needs
    verl.check_env()                        the same from Python

[✓] works   [✗] is broken or missing   [!] works, with something to know. Nothing heavy is imported into this process:
every package is tried in another one, since a package that is installed may still fail to load.
"""

from collections.abc import Sequence
from pathlib import Path

from verl.env_check import machine, packages
from verl.env_check.report import FAULT, OK, Check, EnvReport

__all__ = ["Check", "EnvReport", "check_env", "inspect_env"]

_PACKAGE = Path(__file__).parents[1]

#: mode -> (the file of the package that makes it, the findings that it needs)
_MODES: dict[str, tuple[str, tuple[str, ...]]] = {
    "local trainer, one process": ("trainer/local_trainer.py", ()),
    "several processes on this host": ("single_controller/local/process_pool.py", ("FSDP2",)),
    "Ray, one or many hosts": ("single_controller/ray/group.py", ("Ray", "FSDP2")),
    "rollout.name=hf": ("rollout/hf.py", ()),
    "rollout.name=native": ("rollout/native/engine.py", ()),
    "rollout.name=vllm": ("rollout/vllm/engine.py", ("vLLM",)),
    "rollout.name=sglang": ("rollout/sglang/engine.py", ("SGLang",)),
    "strategy=fsdp2": ("engines/sharding.py", ("FSDP2",)),
    "strategy=megatron": ("engines/megatron/engine.py", ("Megatron", "GPU")),
}


def check_env(verbose: bool = True) -> EnvReport:
    """Check this machine, print the findings and return them. verbose=False prints only what is not well.

    Raises SystemExit(1), after printing, when a part is missing or broken that every run needs; a part that only some
    modes need does not count. `inspect_env` neither prints nor exits.
    """
    report = inspect_env()
    for check in report.checks:
        if verbose or check.state != OK:
            print(check)
    if verbose:
        print("\nVersions used side by side: " + ", ".join(f"{n} {v}" for n, v in packages.TESTED_TOGETHER.items()))
        print("\nWhat can run here:")
        width = max(map(len, report.modes))
        for mode, reason in report.modes.items():
            print(f"  {mode:<{width}}  {'yes' if reason is None else f'no: {reason}'}")
    if not report.ok:
        raise SystemExit(1)
    return report


def inspect_env() -> EnvReport:
    """The findings about this machine; takes some seconds, most of them imports in other processes."""
    probes = packages.probe_packages()
    gpus = machine.check_gpus(probes["torch"], machine.nvidia_smi())
    checks = [
        packages.check_python(),
        *packages.check_core(probes),
        *gpus,
        packages.check_fsdp2(probes),
        packages.check_attention(probes, gpu=gpus[0].state == OK),
        *packages.check_optional(probes, unused=_needed_by(built=False) - _needed_by(built=True)),
        machine.check_disk(),
        machine.check_shared_memory(),
        machine.check_open_files(),
        *machine.check_variables(),
    ]
    found = tuple(check for check in checks if check is not None)
    return EnvReport(found, possible_modes(found))


def _needed_by(built: bool) -> set[str]:
    """The findings that modes of this version need, or (built=False) modes that it has not got."""
    return {name for file, needs in _MODES.values() if (_PACKAGE / file).is_file() == built for name in needs}


def possible_modes(checks: Sequence[Check]) -> dict[str, str | None]:
    """Mode -> None when it can run with these findings, else why not."""
    found = {check.name: check for check in checks}
    broken = [check.name for check in checks if check.required and check.state == FAULT]
    modes: dict[str, str | None] = {}
    for mode, (file, needs) in _MODES.items():
        if not (_PACKAGE / file).is_file():
            modes[mode] = "not built in this version"
        elif broken:
            modes[mode] = f"{', '.join(broken)} first"
        else:
            missing = [name for name in needs if found[name].state != OK]
            modes[mode] = f"needs {' and '.join(missing)}" if missing else None
    return modes
