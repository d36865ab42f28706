"""Python programs in processes of their own that need not import everything anew: forks of a server (`fork_server`)."""

import os
import pickle
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from verl.processes import fork_server
from verl.processes.child import Channel, ChildProcess, PythonProcess, import_path
from verl.processes.fork_server import ForkedProcess, server_for

#: most of what the programs of the project import; not pyarrow, which starts a thread
PRELOAD = ("transformers.modeling_utils", "verl.workers.policy", "verl.workers.critic", "verl.rollout.native.engine")


def start_python(
    *arguments: str, stdout: int, stderr: int, cwd: Path, env: Mapping[str, str] = os.environ, stdin: int | None = None
) -> ForkedProcess:
    """`python ARGUMENTS` with -m, -c or a script. stdout, stderr, stdin: file descriptors."""
    reader, writer = os.pipe()
    try:
        os.write(writer, "\0".join([str(cwd), *arguments]).encode())
        os.close(writer)
        files = [reader, stdout, stderr, *([] if stdin is None else [stdin])]
        return server_for(env).start("tests.programs", files, env, preload=PRELOAD)
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


class ReadyServer(ChildProcess):
    """A fork server that is a fork of this process, made before it has threads, with what this one has imported.

    It becomes the first server that this process starts for its own environment.
    """

    def __init__(self):
        super().__init__(reports=False)
        self._status: int | None = None
        self._channel, self.theirs = Channel.pair()
        self._for = fork_server._without_late(os.environ), fork_server._inherited()
        self.pid = os.fork()

    def serve(self) -> None:
        """In the fork: wait for the channel of the server, and serve. Returns in the processes that it starts."""
        os.setsid()
        self._channel.close()
        try:
            data, (control,) = self.theirs.receive()
        except EOFError:  # it was not needed
            os._exit(0)
        self.theirs.close()
        first = pickle.loads(data).split(os.pathsep)
        sys.path[:] = [*first, *(path for path in sys.path if path not in first)]
        sys.argv[1:] = [str(control)]
        fork_server.main()

    def start(self, module: str, inherited: Sequence[int], env: Mapping[str, str], **options) -> ChildProcess:
        """In place of `PythonProcess`."""
        found = fork_server._without_late(env), fork_server._inherited()
        if module == "verl.processes.fork_server" and found == self._for:
            fork_server.PythonProcess = PythonProcess
            self._channel.send(pickle.dumps(import_path()), list(inherited))
            return self
        return PythonProcess(module, inherited, env, **options)

    def wait(self, timeout: float | None = None) -> int | None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._status is None:
            ended, status = os.waitpid(self.pid, 0 if deadline is None else os.WNOHANG)
            if ended:
                self._status = os.waitstatus_to_exitcode(status)
            elif time.monotonic() >= deadline:
                break
            else:
                time.sleep(0.01)
        return self._status


def main() -> None:
    reader, *files = map(int, sys.argv[1:])
    if len(files) == 3:  # a worker of pytest-xdist, the only program with an input
        server = ReadyServer()
        if not server.pid:
            for descriptor in (reader, *files):
                os.close(descriptor)
            return server.serve()
        server.theirs.close()
        fork_server.PythonProcess = server.start
    for source, target in zip(files, (1, 2, 0)):
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
