"""Import probes in a subprocess, so that a package that hangs or crashes does not affect this process; results."""

import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
    """Run snippets one after another in one subprocess with the same sys.path.

    Every name gets a result; those after a crash or the timeout are reported as not tried.
    """
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
        ending = _ending(process.returncode)
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


def _ending(returncode: int) -> str:
    if returncode < 0:
        return f"the process was killed by {signal.Signals(-returncode).name}"
    return f"the process exited with status {returncode}"


def version_of(*distributions: str) -> str | None:
    """Return the version of the first of these distributions that is installed; None if none is."""
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def at_least(version: str, minimum: str) -> bool:
    """Compare dotted version numbers, ignoring suffixes (+cpu, rc1, .dev0)."""

    def numbers(text: str) -> list[int]:
        parts = [int(n) for n in re.match(r"\d+(?:\.\d+)*", text).group().split(".")]
        return parts + [0] * (4 - len(parts))

    return numbers(version) >= numbers(minimum)


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
