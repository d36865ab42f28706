"""Trying imports in another process: a package that is broken, hangs or crashes is a finding there, and no accident."""

import importlib.metadata
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

TIMEOUT = 60.0

# Runs each piece of code by itself and reports as it goes, so that a crash tells which piece it was.
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
    """What became of a piece of code. error: None when it ran through. info: what it left in the variable `info`."""

    error: str | None = None
    info: Any = None


def run_probes(codes: Mapping[str, str], timeout: float = TIMEOUT) -> dict[str, Probe]:
    """Run pieces of code one after another in one new process that finds the packages that this one finds.

    Every name gets a result: what comes after a crash or the timeout says that it was not reached.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", _CHILD, json.dumps(dict(codes))]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment)
    try:
        output, _ = process.communicate(timeout=timeout)
        ending = _ending(process.returncode)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        ending = f"it did not end within {timeout:g} s"
    found: dict[str, Probe] = {}
    started = None
    for line in output.splitlines():
        record = _record(line)
        if record is None:
            continue
        started = record["name"]
        if "error" in record or "info" in record:
            found[started] = Probe(record.get("error"), record.get("info"))
    for name in codes:
        if name not in found:
            found[name] = Probe(ending if name == started else f"not tried: {started} failed before it ({ending})")
    return found


def _record(line: str) -> dict[str, Any] | None:
    """A line that the child wrote about a probe; None for what a package printed."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError:
        return None
    return record if isinstance(record, dict) and "name" in record else None


def _ending(returncode: int) -> str:
    if returncode < 0:
        return f"the process was ended by {signal.Signals(-returncode).name}"
    return f"the process ended with status {returncode}"


def is_installed(module: str) -> bool:
    """Whether `import module` would find code. A mere folder of that name (in the working directory, say) is none."""
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # the package around it is missing
        return False
    return spec is not None and spec.origin is not None


def version_of(*distributions: str) -> str | None:
    """The version of the first of these distributions that is installed, None when there is none."""
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def at_least(version: str, minimum: str) -> bool:
    """Compare dotted numbers; what follows them (+cpu, rc1, .dev0) is left aside."""

    def numbers(text: str) -> list[int]:
        found = [int(n) for n in re.match(r"\d+(?:\.\d+)*", text).group().split(".")]
        return found + [0] * (4 - len(found))

    return numbers(version) >= numbers(minimum)
