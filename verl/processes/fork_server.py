"""Python processes that start in milliseconds: forks of a process that has already imported their modules.

    server = server_for(env)
    process = server.start("verl.single_controller.local.worker_main", [theirs.fileno()], env, preload=["transformers"])

A `ForkedProcess` has the interface of `PythonProcess`. The server is a child of this process. It imports modules and
forks; it has one thread, holds no lock and uses no device. It exits when this process ends for any reason, and kills
its children. The children share the memory of the libraries.

A child starts with the state of a fresh interpreter: environment, working directory, output, `sys.argv`, `__main__`,
signals and unseeded random generators. At its end, threads are joined and atexit handlers run. The differences are:

- A module that reads environment variables when it is imported has read those of the server. Processes therefore share
  a server only if their environments are equal except for `_LATE_VARIABLES`.
- The children of a server have the same hash seed.
- The BLAS of numpy has one thread. A server with OPENBLAS_NUM_THREADS above 1 has several threads and cannot fork.

`multiprocessing.forkserver` with preloaded modules starts processes as fast, and was tried in its place. It cannot give
a server an environment without changing that of this process, hides why a module was not imported, forks a server that
has threads, and leaves children behind when the parent is killed.

Linux only.
"""

import gc
import importlib
import os
import pickle
import resource
import selectors
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from verl.processes.child import STACK_SIGNAL, Channel, ChildProcess, PythonProcess, describe_exit, import_path

START_SECONDS = 300.0  # for the server to import the libraries: a shared disk can be slow at first
_MAX_IDLE_SERVERS = 3
_HANDED_OUT_SECONDS = 10.0  # between `server_for` and `start`, at most: the server is not idle yet

# Variables that no module reads when it is imported. The server has OMP_NUM_THREADS=1, its children their own number.
_LATE_VARIABLES = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
_LATE_VARIABLES |= {"OMP_NUM_THREADS", "PWD", "OLDPWD", "SHLVL", "_"}
_LATE_PREFIXES = ("VERL_", "NCCL_", "GLOO_", "PYTEST_")


class ForkServerError(RuntimeError):
    """The server cannot start processes; the message has the reason."""


# ---- in the parent --------------------------------------------------------------------------------------------------


class ForkedProcess(ChildProcess):
    """A process started by a `ForkServer`. `poll` and `wait` raise ChildProcessError if the server has ended."""

    def __init__(self, server: "ForkServer", channel: Channel, reports: bool):
        super().__init__(reports)
        self._server, self._channel = server, channel  # on which the server sends process id and exit status
        self._status: int | None = None

    def wait(self, timeout: float | None = None) -> int | None:
        if self._status is None and self._channel.has_message(timeout):
            try:
                self._status = pickle.loads(self._channel.receive()[0])
            except EOFError:
                raise ChildProcessError(f"process {self.pid} was lost: {self._server.exit_message()}") from None
        return self._status

    def exit_message(self) -> str | None:
        try:
            return super().exit_message()
        except ChildProcessError as error:
            return str(error)

    def close(self) -> None:
        with suppress(ChildProcessError):
            self.wait()
        self.release()

    def release(self) -> None:
        self._server.processes.discard(self)
        self._channel.close()
        self.close_reports()


class ForkServer:
    """A server process, with the environment `env` without the variables that children may differ in. Can be used from
    several threads."""

    def __init__(self, env: Mapping[str, str]):
        self.processes: weakref.WeakSet[ForkedProcess] = weakref.WeakSet()  # those that are starting included
        self.handed_out = time.monotonic()  # by `server_for`, last
        self._lock = threading.Lock()
        self._channel, theirs = Channel.pair()
        with theirs:
            # With more threads, OpenBLAS starts them when numpy is imported.
            server_env = {**_without_late(env), "OMP_NUM_THREADS": "1"}
            self._process = PythonProcess("verl.processes.fork_server", [theirs.fileno()], server_env)
        self.pid = self._process.pid

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def is_idle(self) -> bool:
        """Whether the server has no process, and is not about to start one for who has just asked for it."""
        return not (time.monotonic() - self.handed_out < _HANDED_OUT_SECONDS or self.processes)

    def exit_message(self) -> str:
        status = self._process.wait(5.0)
        end = "closed its channel" if status is None else describe_exit(status)
        return f"the fork server (process {self.pid}) {end}"

    def start(
        self,
        module: str,
        inherited: Sequence[int],
        env: Mapping[str, str],
        *,
        reports: bool = False,
        preload: Sequence[str] = (),
        cancelled: Callable[[], bool] = lambda: False,
    ) -> ForkedProcess:
        """Start a process that calls `main()` of a module.

        Args:
            inherited, env, reports: As for `PythonProcess`.
            preload: Further modules for the server to import. Children then need not import them.
            cancelled: Called every 0.1 s while the server imports modules; True ends the wait.

        Raises:
            ForkServerError: The server has ended, could not import a module, or has several threads.
            InterruptedError: The wait was cancelled.
        """
        channel, theirs = Channel.pair()
        process = ForkedProcess(self, channel, reports)
        self.processes.add(process)
        folder = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
        request = {"modules": [*preload, module], "env": {**env, "PYTHONPATH": import_path()}, "reports": reports}
        request["open_files"] = resource.getrlimit(resource.RLIMIT_NOFILE)
        descriptors = [theirs.fileno(), folder, 1, 2, *inherited, *process.report_descriptors]
        try:
            with theirs, self._lock:
                self._channel.send(pickle.dumps(request), descriptors)
            process.pid = self._read_pid(channel, cancelled)
        except BaseException as error:
            process.release()
            if isinstance(error, InterruptedError) and not self.processes:
                self.close()
            if isinstance(error, EOFError | ConnectionError):
                raise ForkServerError(self.exit_message()) from None
            raise
        finally:
            os.close(folder)
        return process

    def _read_pid(self, channel: Channel, cancelled: Callable[[], bool]) -> int:
        deadline = time.monotonic() + START_SECONDS
        while not channel.has_message(0.1):
            if cancelled():
                raise InterruptedError("the start of a process was cancelled")
            if time.monotonic() > deadline:
                raise ForkServerError(f"no reply of the fork server (process {self.pid}) within {START_SECONDS:g} s")
        reply = pickle.loads(channel.receive()[0])
        if isinstance(reply, str):
            raise ForkServerError(f"the fork server (process {self.pid}): {reply}")
        return reply

    def close(self) -> None:
        """End the server. Its processes must have ended."""
        self._process.kill()
        self._process.close()
        self._channel.close()


_servers: dict[tuple, ForkServer] = {}  # least recently used first
_servers_lock = threading.Lock()


def server_for(env: Mapping[str, str]) -> ForkServer:
    """The server for processes with these environment variables. It is started if there is none, or if it has ended.

    Raises:
        ForkServerError: This process has closed its standard output or error, which children would share.
    """
    for descriptor in (1, 2):
        try:
            os.fstat(descriptor)
        except OSError as error:
            raise ForkServerError(f"file descriptor {descriptor} is closed") from error
    key = (os.getpid(), sys.executable, import_path(), _inherited(), *sorted(_without_late(env).items()))
    with _servers_lock:
        server = _servers.pop(key, None)
        if server is None or not server.is_alive():
            server = ForkServer(env)
        server.handed_out = time.monotonic()
        idle = [other for other, unused in _servers.items() if other[0] == os.getpid() and unused.is_idle()]
        for other in idle[: max(len(idle) - _MAX_IDLE_SERVERS, 0)]:
            _servers.pop(other).close()
        _servers[key] = server
        return server


def _without_late(env: Mapping[str, str]) -> dict[str, str]:
    return {k: v for k, v in env.items() if k not in _LATE_VARIABLES and not k.startswith(_LATE_PREFIXES)}


def _inherited() -> tuple:
    """State that a child process inherits from its parent and that a request does not contain."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    umask = status.partition("Umask:")[2].split(maxsplit=1)[0]
    names = {name for name in dir(resource) if name.startswith("RLIMIT_")} - {"RLIMIT_NOFILE", "RLIMIT_OFILE"}
    limits = [resource.getrlimit(getattr(resource, name)) for name in sorted(names)]
    return umask, tuple(sorted(os.sched_getaffinity(0))), os.getpriority(os.PRIO_PROCESS, 0), tuple(limits)


# ---- in the server and its children ---------------------------------------------------------------------------------


class _Server:
    """Forks a child for each request. Sends its process id, or an error as text, and later its exit status."""

    def __init__(self, control: Channel):
        self._control = control
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)
        # process id -> (descriptor of the process, channel of its `ForkedProcess`)
        self._children: dict[int, tuple[int, Channel]] = {}
        self._refusal: str | None = None

    def serve(self) -> ModuleType:
        """Serve requests until the parent ends. Returns in the children only: the module to run."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is not self._control:
                    self._report_exit(key.data)
                    continue
                try:
                    data, (channel, *descriptors) = self._control.receive()
                except EOFError:
                    for pid in self._children:
                        with suppress(ProcessLookupError):
                            os.killpg(pid, signal.SIGKILL)
                    os._exit(0)
                module = self._start(pickle.loads(data), Channel(channel), descriptors)
                if module is not None:
                    return module

    def _start(self, request: dict[str, Any], channel: Channel, descriptors: list[int]) -> ModuleType | None:
        """Fork a child and send its process id, or an error. Returns the module in the child."""
        try:
            module = _import(request["modules"])
            self._require_one_thread(request["modules"])
            ready, child_ready = os.pipe()
            pid = os.fork()
        except BaseException as error:  # modules can raise anything, SystemExit included
            with channel, suppress(ConnectionError):
                channel.send(pickle.dumps(f"{type(error).__name__}: {error}"))
            pid = None
        if pid == 0:
            os.setsid()
            os.close(ready)
            os.close(child_ready)
            channel.close()
            self._close()
            resource.setrlimit(resource.RLIMIT_NOFILE, request["open_files"])
            _become(module, descriptors, request["env"], request["reports"])
            return module
        for descriptor in descriptors:
            os.close(descriptor)
        if pid is None:
            return None
        os.close(child_ready)
        os.read(ready, 1)  # a process group can be killed when it exists
        os.close(ready)
        process = os.pidfd_open(pid)
        self._children[pid] = process, channel
        self._selector.register(process, selectors.EVENT_READ, pid)
        try:
            channel.send(pickle.dumps(pid))
        except ConnectionError:  # the start was cancelled, or the parent has ended
            os.killpg(pid, signal.SIGKILL)
        return None

    def _require_one_thread(self, modules: Sequence[str]) -> None:
        """Raise RuntimeError if this process cannot be forked."""
        os.close(os.pidfd_open(os.getpid()))  # OSError: an old system
        num_threads = len(os.listdir("/proc/self/task"))
        if num_threads > 1 and self._refusal is None:
            self._refusal = f"expected one thread after the import of {', '.join(modules)}, found {num_threads}"
        if self._refusal is not None:
            raise RuntimeError(self._refusal)

    def _report_exit(self, pid: int) -> None:
        process, channel = self._children.pop(pid)
        self._selector.unregister(process)
        _, status = os.waitpid(pid, 0)
        os.close(process)
        with channel, suppress(ConnectionError):  # the parent does not wait for it
            channel.send(pickle.dumps(os.waitstatus_to_exitcode(status)))

    def _close(self) -> None:
        """In a child: close what belongs to the server."""
        self._control.close()
        self._selector.close()
        for process, channel in self._children.values():
            os.close(process)
            channel.close()


def _import(modules: Sequence[str]) -> ModuleType:
    """Import modules; the last one. Raises what they raise."""
    if any(name not in sys.modules for name in modules):
        importlib.invalidate_caches()  # folders may have changed since the server read them
        for name in modules:
            importlib.import_module(name)
        gc.collect()
        gc.freeze()  # the collector does not write to the objects, so that children share their memory
    return sys.modules[modules[-1]]


#: of the children: those that this process had at its start, such as SIG_IGN for SIGINT in a job in the background
_HANDLERS: dict[signal.Signals, Any] = {}


def _become(module: ModuleType, descriptors: Sequence[int], env: Mapping[str, str], reports: bool) -> None:
    """In a child: set what a fresh interpreter that runs `module` would have."""
    folder, stdout, stderr, *inherited = descriptors
    os.fchdir(folder)
    for source, target in ((stdout, 1), (stderr, 2)):
        os.dup2(source, target)
        os.close(source)
    os.close(folder)
    sys.stdout.reconfigure(line_buffering=os.isatty(1))
    os.environ.clear()
    os.environ.update(env)
    signal.pthread_sigmask(signal.SIG_SETMASK, {STACK_SIGNAL} if reports else ())
    for number, handler in _HANDLERS.items():
        signal.signal(number, handler)
    sys.argv[:] = [module.__file__, *map(str, inherited)]
    sys.modules["__main__"] = module
    importlib.invalidate_caches()  # folders may have changed since the server read them
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "torch" in sys.modules:  # Python seeds its own generator after a fork
        sys.modules["torch"].default_generator.seed()
        sys.modules["torch"].set_num_threads(_num_threads(env))


def _num_threads(env: Mapping[str, str]) -> int:
    """Number of threads that OMP_NUM_THREADS sets; of a list, with one number per nesting level, the first."""
    number = env.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(number) if number.isdigit() and int(number) > 0 else len(os.sched_getaffinity(0))


def main() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {STACK_SIGNAL})  # blocked until the child has a handler
    for number in (signal.SIGINT, signal.SIGTERM):  # Slurm signals every process of a job; the parent ends this one
        _HANDLERS[number] = signal.signal(number, signal.SIG_IGN)
    module = _Server(Channel(int(sys.argv[1]))).serve()
    module.main()


if __name__ == "__main__":
    main()
