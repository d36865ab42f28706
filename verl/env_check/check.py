"""Environment check: one line per component, the fix for each problem, and the modes that can run here.

    python -m verl.utils.env_check          exit status 1 if a required component is missing or broken
    verl.check_env()                        the same from Python

[✓] works   [✗] broken or missing   [!] works, with a remark. Packages are imported in a subprocess, since an installed
package may still fail to load; this process imports nothing heavy.
"""

from collections.abc import Sequence

from verl.engines.traits import built_in_strategies
from verl.env_check import machine, packages
from verl.env_check.report import FAULT, OK, Check, EnvReport
from verl.rollout.traits import built_in_engines

__all__ = ["Check", "EnvReport", "check_env", "inspect_env"]

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
    gpus = machine.check_gpus(probes["torch"], machine.nvidia_smi())
    checks = [
        packages.check_python(),
        *packages.check_core(probes),
        *gpus,
        packages.check_fsdp2(probes),
        packages.check_attention(probes, gpu=gpus[0].state == OK),
        *packages.check_optional(probes),
        machine.check_disk(),
        machine.check_shared_memory(),
        machine.check_open_files(),
        *machine.check_variables(),
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
