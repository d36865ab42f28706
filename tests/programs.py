"""Python programs in processes of their own that need not import everything anew: forks of a server (`fork_server`)."""

import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from verl.processes.fork_server import ForkedProcess, server_for

#: most of what the programs of the project import; not pyarrow, which starts a thread
PRELOAD = ("transformers.modeling_utils", "verl.workers.policy", "verl.workers.critic", "verl.rollout.native.engine")


def start_python(
    *arguments: str, stdout: int, stderr: int, cwd: Path, env: Mapping[str, str] = os.environ
) -> ForkedProcess:
    """`python ARGUMENTS` with -m, -c or a script. stdout, stderr: file descriptors."""
    reader, writer = os.pipe()
    try:
        os.write(writer, "\0".join([str(cwd), *arguments]).encode())
        os.close(writer)
        return server_for(env).start("tests.programs", [stdout, stderr, reader], env, preload=PRELOAD)
    finally:
        os.close(reader)


def run_python(
    *arguments: str, cwd: Path, env: Mapping[str, str] = os.environ, timeout: float = 200
) -> subprocess.CompletedProcess:
    """As `subprocess.run(["python", *arguments], capture_output=True, text=True)`."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = start_python(*arguments, stdout=out.fileno(), stderr=err.fileno(), cwd=cwd, env=env)
        try:
            status = process.wait(timeout)
            assert status is not None, f"not done after {timeout} s: {' '.join(arguments)}"
        finally:
            process.kill()
            process.close()
        shown = [(file.seek(0), file.read())[1] for file in (out, err)]
    return subprocess.CompletedProcess(["python", *arguments], status, *shown)


def main() -> None:
    stdout, stderr, reader = map(int, sys.argv[1:])
    for source, target in ((stdout, 1), (stderr, 2)):
        os.dup2(source, target)
        os.close(source)
    with os.fdopen(reader) as file:
        folder, program, *arguments = file.read().split("\0")
    os.chdir(folder)
    sys.stdout.reconfigure(line_buffering=False)
    if program == "-m":
        sys.path.insert(0, folder)
        sys.argv = arguments
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    elif program == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *arguments[1:]]
        exec(arguments[0], {"__name__": "__main__"})
    else:
        sys.argv = [program, *arguments]
        sys.path.insert(0, str(Path(program).resolve().parent))
        runpy.run_path(program, run_name="__main__")
