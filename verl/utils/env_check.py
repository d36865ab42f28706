"""What this machine can run: one line per part, the command that mends each fault, and the modes that are possible.

    python -m verl.utils.env_check          exit status 1 when a part is missing that every run needs
    verl.check_env()                        the same from Python

[✓] works   [✗] is broken or missing   [!] works, with something to know. Nothing heavy is imported into this process:
every package is tried in another one, since a package that is installed may still fail to load.
"""

from collections.abc import Sequence
from pathlib import Path

from verl.utils import env_machine, env_packages
from verl.utils.env_report import FAULT, OK, Check, EnvReport

__all__ = ["Check", "EnvReport", "check_env", "inspect_env"]

_PACKAGE = Path(__file__).parents[1]

#: mode -> (the file of the package that makes it, the findings that it needs)
_MODES: dict[str, tuple[str, tuple[str, ...]]] = {
    "local trainer, one process": ("trainer/local_trainer.py", ()),
    "several processes on this host": ("single_controller/process_pool.py", ("FSDP2",)),
    "Ray, one or many hosts": ("trainer/ray_trainer.py", ("Ray", "FSDP2")),
    "rollout.name=hf": ("rollout/hf.py", ()),
    "rollout.name=native": ("rollout/native.py", ()),
    "rollout.name=vllm": ("rollout/vllm_engine.py", ("vLLM",)),
    "rollout.name=sglang": ("rollout/sglang_engine.py", ("SGLang",)),
    "strategy=fsdp2": ("engines/fsdp.py", ("FSDP2",)),
    "strategy=megatron": ("engines/megatron.py", ("Megatron", "GPU")),
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
        print("\nVersions used side by side: " + ", ".join(f"{n} {v}" for n, v in env_packages.TESTED_TOGETHER.items()))
        print("\nWhat can run here:")
        width = max(map(len, report.modes))
        for mode, reason in report.modes.items():
            print(f"  {mode:<{width}}  {'yes' if reason is None else f'no: {reason}'}")
    if not report.ok:
        raise SystemExit(1)
    return report


def inspect_env() -> EnvReport:
    """The findings about this machine; takes some seconds, most of them imports in other processes."""
    probes = env_packages.probe_packages()
    gpus = env_machine.check_gpus(probes["torch"], env_machine.nvidia_smi())
    checks = [
        env_packages.check_python(),
        *env_packages.check_core(probes),
        *gpus,
        env_packages.check_fsdp2(probes),
        env_packages.check_attention(probes, gpu=gpus[0].state == OK),
        *env_packages.check_optional(probes, unused=_needed_by(built=False) - _needed_by(built=True)),
        env_machine.check_disk(),
        env_machine.check_shared_memory(),
        env_machine.check_open_files(),
        *env_machine.check_variables(),
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


if __name__ == "__main__":
    check_env()
