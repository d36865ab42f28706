"""WorkerGroup: a Worker class over n ranks, called like a single object.

    class Adder(Worker):
        @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
        def add(self, batch: DataProto, value: float) -> DataProto:
            return DataProto.from_dict({"y": batch.batch["x"] + value})

    group = LocalWorkerGroup(WorkerSpec(Adder), n_workers=2)
    out = group.add(batch, 1.0)                      # half of the rows on each rank; out has all of them, in order
    future = group.submit("add", batch, value=2.0)   # does not wait
    out = future.get()

Every registered method of the class becomes a method of the group: dispatch -> execute -> collect. A pool executes the
calls: in this process, in processes of this host, or in Ray actors.
"""

import functools
import inspect
import os
import re
import socket
import traceback
from collections import deque
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import psutil

from verl.processes.limits import Durations, Elapsed
from verl.registry import did_you_mean
from verl.single_controller.dispatch import Call, Dispatch, Layout, Registered, registered_methods
from verl.single_controller.worker import Worker
from verl.utils.redaction import redact_text

# ---- the rank that a call waits for ---------------------------------------------------------------------------------

_WAITING_FUNCTIONS = ("torch/distributed/distributed_c10d.py", "torch/distributed/_functional_collectives.py")
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>.+)')


@dataclass(frozen=True)
class RankState:
    """The observed state of a rank."""

    rank: int
    pid: int  # its process
    host: str
    status: str | None  # state of the process, as in psutil; None if its host could not be asked
    busy: bool = True  # whether it has not replied to the call

    @property
    def is_stopped(self) -> bool:
        return self.status == psutil.STATUS_STOPPED

    @property
    def is_suspect(self) -> bool:
        """Whether the process cannot work: it is stopped, has ended, or its host does not respond."""
        return self.status in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD, None)

    def __str__(self) -> str:
        conditions: Mapping[str | None, str] = {
            psutil.STATUS_STOPPED: f"is stopped: SIGSTOP (`kill -CONT {self.pid}` continues it)",
            psutil.STATUS_TRACING_STOP: "is stopped by a debugger",
            psutil.STATUS_ZOMBIE: "has ended and is a zombie",
            psutil.STATUS_DEAD: "has ended",
            psutil.STATUS_DISK_SLEEP: "is in an uninterruptible sleep: it waits for a disk, a network file system or a "
            "device",
            psutil.STATUS_RUNNING: "is running",
            None: "is in an unknown state, since its host does not respond",
        }
        return f"rank {self.rank} (process {self.pid}) {conditions.get(self.status, f'is {self.status}')}"


class CallWatch:
    """The limit of the call `role`.`method`().

    Args:
        durations: Of earlier calls.
        operator: The operator that makes the call; None for other calls.

    Attributes:
        limit: Of the call; for the constructors of workers, that of their start.
    """

    def __init__(self, durations: Durations, role: str, method: str, operator: str | None):
        self.elapsed = Elapsed()  # since the call started
        self._durations, self._name = durations, None if operator is None else (operator, role, method)
        self.limit = durations.start_limit if method == "__init__" else durations.limit(self._name)
        self._operator = "" if operator is None else f" in operator {operator!r}"

    def record(self, seconds: float) -> None:
        """Record the duration of the call, for the limits of later ones."""
        if self._name is not None:
            self._durations.record(self._name, seconds)

    def no_reply_message(self, waited: str, late: Sequence[int], replied: Collection[int]) -> str:
        replies = f"replied: {sorted(replied) or 'none'}; limit: {self.limit.reason}"
        return f"no reply after {waited} from ranks {late} ({replies}){self._operator}"


def find_culprit(states: Sequence[RankState], stacks: Mapping[int, str]) -> tuple[RankState, str]:
    """The rank that the others wait for, and a description of its state."""
    suspects = [state for state in states if state.is_suspect]
    late = [state for state in states if state.busy] or list(states)
    if suspects:
        return suspects[0], "; ".join(map(str, suspects))
    asleep = [state for state in late if state.status == psutil.STATUS_DISK_SLEEP]
    if asleep:
        return asleep[0], "; ".join(map(str, asleep))
    frames = {state.rank: _call_frames(stacks.get(state.rank, "")) for state in late}
    waiting = [s for s in late if any(f["file"].endswith(_WAITING_FUNCTIONS) for f in frames[s.rank][:4])]
    if len(waiting) == len(late):
        ranks = [state.rank for state in waiting]
        return late[0], f"ranks {ranks} wait in a collective operation, and each process is alive: check the network"
    positions: dict[str, list[RankState]] = {}  # innermost function -> ranks in it; the culprit's differs
    for state in late:
        if state not in waiting:
            position = "".join(f", in {f['name']} ({f['file']}:{f['line']})" for f in frames[state.rank][:1])
            positions.setdefault(position, []).append(state)
    position, (culprit, *_) = min(positions.items(), key=lambda item: len(item[1]))
    partners = f" while ranks {[state.rank for state in waiting]} wait in a collective operation" if waiting else ""
    return culprit, f"{culprit}{position}{partners}"


def _call_frames(stacks: str) -> list[re.Match[str]]:
    """The frames of the thread that runs the call, innermost first."""
    for thread in re.split(r"\n\s*\n", stacks):
        frames = [match for line in thread.splitlines() if (match := _FRAME.search(line))]
        if any(frame["file"].endswith(("local/worker_main.py", "ray/rank_actor.py")) for frame in frames[1:]):
            return frames
    return []


# ---- when ranks worked ----------------------------------------------------------------------------------------------


class CallSpan(NamedTuple):
    """One call of one rank. start, end: seconds since the epoch, by the clock of its host."""

    process: str  # host:pid
    rank: int
    role: str
    method: str
    start: float
    end: float


#: the latest calls of all groups of this process, in the order of their replies
_spans: deque[CallSpan] = deque(maxlen=10_000)


def record_span(host: str, pid: int, rank: int, role: str, method: str, start: float, end: float) -> None:
    """Record a call, until `take_spans` removes it. Arguments: the process, then those of `CallSpan`."""
    _spans.append(CallSpan(f"{host}:{pid}", rank, role, method, start, end))


def take_spans(since: float) -> list[CallSpan]:
    """Remove all recorded calls. Returns those that ended after `since`, by their start."""
    spans = [_spans.popleft() for _ in range(len(_spans))]
    return sorted((span for span in spans if span.end > since), key=lambda span: span.start)


T = TypeVar("T")

CALL_TIMEOUT = 3600.0  # default limit of one call in another process, seconds


# ---- errors -------------------------------------------------------------------------------------------------------


class WorkerError(RuntimeError):
    """A call failed on a worker in another process. The message ends with the traceback of that process.

    Attributes:
        message: What happened, in one line.
        role, method: The call.
        rank, host: The rank that failed, and the name of its host.
        traceback: Traceback of the worker as text; empty if there is none.
    """

    def __init__(self, message: str, role: str, method: str, rank: int, host: str = "", traceback: str = ""):
        host = host or socket.gethostname()
        super().__init__(message, role, method, rank, host, traceback)
        self.message, self.role, self.method, self.rank = message, role, method, rank
        self.host, self.traceback = host, traceback

    @classmethod
    def from_exception(cls, error: BaseException, role: str, method: str, rank: int) -> "WorkerError":
        """Convert an exception of this process to text without secrets: the caller may not have its class."""
        stack = error.__traceback__
        executor = (_PACKAGE_DIR, f"{_PACKAGE_DIR}/local", f"{_PACKAGE_DIR}/ray")
        while stack and stack.tb_next and os.path.dirname(stack.tb_frame.f_code.co_filename) in executor:
            stack = stack.tb_next  # show the worker's code, not the executor's
        text = redact_text("".join(traceback.format_exception(type(error), error, stack)))
        return cls(redact_text(f"{type(error).__name__}: {error}"), role, method, rank, traceback=text)

    def __str__(self) -> str:
        headline = f"{self.role}.{self.method}() on rank {self.rank} ({self.host}): {self.message}"
        return f"{headline}\n\n{self.traceback.rstrip()}" if self.traceback else headline


_PACKAGE_DIR = os.path.dirname(__file__)


class WorkerDied(WorkerError):
    """The process of a worker ended during a call."""


class NodeLost(WorkerDied):
    """The node of a worker has left the cluster."""


class WorkerTimeout(WorkerError):
    """A call exceeded its time limit. `traceback` has the stacks of all threads of all ranks."""


def timeout_error(
    states: Sequence[RankState], stacks: Mapping[int, str], role: str, method: str, waited: str
) -> WorkerTimeout:
    """The error of a call that waits for a rank.

    Args:
        states: Of all ranks.
        stacks: Rank -> the stacks of its threads.
        waited: For how long the call `role`.`method`() has waited, and for whom.
    """
    culprit, reason = find_culprit(states, stacks)
    text = "\n\n".join(f"--- {state}\n{stacks.get(state.rank, '')}".rstrip() for state in states)
    message = f"{reason}; {waited}; states and stacks of all ranks:"
    return WorkerTimeout(message, role, method, culprit.rank, culprit.host, text)


Failure = tuple[int, float, WorkerError]
"""An error that an executor received: (order, time in seconds, error). The one with the lowest (order, time) is the
cause: a dead process (order 0) makes other ranks raise (order 1), an exception causes later ones, and both cause
timeouts (order 2)."""


def first_error(failures: Sequence[Failure]) -> WorkerError:
    """The error that caused the others, with a note that lists these."""
    (_, _, error), *later = sorted(failures, key=lambda failure: failure[:2])
    if later:
        error.add_note("\n".join(["followed by:", *("  " + str(e).splitlines()[0] for _, _, e in later)]))
    return error


# ---- futures ------------------------------------------------------------------------------------------------------


class Future(Generic[T]):
    """The result of a call that may still be running.

    Args:
        wait: Function of a timeout (seconds or None) that returns the result, raises the error of the call, or raises
            TimeoutError.
    """

    def __init__(self, wait: Callable[[float | None], T]):
        self._wait: Callable[[float | None], T] | None = wait  # None: it has ended
        self._value: T | None = None
        self._error: Exception | None = None

    @classmethod
    def completed(cls, value: T) -> "Future[T]":
        return cls(lambda timeout: value)

    def get(self, timeout: float | None = None) -> T:
        """Wait for the result, at most `timeout` seconds; None waits without limit.

        Raises:
            TimeoutError: The call is still running. `get` can be called again.
            Exception: The error of the call.
        """
        if self._wait is not None:
            try:
                self._value = self._wait(timeout)
            except TimeoutError:
                raise
            except Exception as error:
                self._error = error
            self._wait = None
        if self._error is not None:
            raise self._error
        return self._value

    def then(self, function: Callable[[T], Any]) -> "Future":
        """The future of `function(result)`, which is evaluated in the thread that calls `get`."""
        return Future(lambda timeout: function(self.get(timeout)))


# ---- the group ----------------------------------------------------------------------------------------------------


class WorkerGroup:
    """A Worker class over `world_size` ranks. `group.method(...)` calls the registered method on the ranks.

    A subclass sets `_pool`, which executes the calls, or implements `execute` and `shutdown`.

    Args:
        name: Role shown in errors; the name of the class by default.

    Raises:
        ValueError: A registered method has the name of a method of WorkerGroup.
    """

    _pool: Any = None  # has `call(role, method, calls)` and `release(role)`; groups of several roles may share it

    def __init__(self, worker_class: type[Worker], world_size: int, name: str | None = None):
        self.worker_class = worker_class
        self.world_size = world_size
        self.name = name or worker_class.__name__
        self._layouts: dict[str | None, Layout] = {}
        self._methods = registered_methods(worker_class)
        for method, registered in self._methods.items():
            if method in dir(WorkerGroup):
                raise ValueError(
                    f"{worker_class.__name__}.{method}() cannot be registered: WorkerGroup has a method {method!r}; "
                    f"choose another name"
                )
            setattr(self, method, self._bind(method, registered))

    def execute(self, method: str, calls: list[Call | None]) -> Future[list]:
        """Run `method` on every rank that has a Call; None for a rank that does not run.

        Returns:
            Future of the results in rank order, each passed through `Call.finish`; None for a rank without a Call.
        """
        return self._pool.call(self.name, method, calls)

    @property
    def processes(self) -> Hashable | None:
        """Identifies the processes of the workers: equal for groups that share them, None for this process."""
        return self._pool

    def shutdown(self) -> None:
        """Release the role. The processes stop when their last role is released."""
        self._pool.release(self.name)

    def layout(self, mesh: str | None = None) -> Layout:
        """The coordinates of all ranks in a mesh. The workers are asked once, at the first use."""
        if mesh not in self._layouts:
            calls = [Call((mesh,)) for _ in range(self.world_size)]
            self._layouts[mesh] = Layout(tuple(self.execute("layout", calls).get()))
        return self._layouts[mesh]

    def submit(self, method: str, *args: Any, **kwargs: Any) -> Future:
        """Start a registered method without waiting, also if it was registered with `blocking=True`.

        Raises:
            ValueError: There is no such method, or its dispatch mode does not accept the arguments.
        """
        if method not in self._methods:
            raise ValueError(self._unknown_method(method))
        registered = self._methods[method]
        # These modes use no coordinates, so they work before a worker has set up its mesh (init_model).
        no_mesh = registered.dispatch_mode in (Dispatch.RANK_ZERO, Dispatch.ONE_TO_ALL, Dispatch.ALL_TO_ALL)
        layout = Layout.grid(dp=self.world_size) if no_mesh else self.layout(registered.mesh)
        try:
            calls = registered.dispatch(layout, args, kwargs)
        except ValueError as error:
            error.add_note(f"in the arguments of {self.name}.{method}()")
            raise
        return self.execute(method, calls).then(functools.partial(self._collect, method, registered, layout))

    def _collect(self, method: str, registered: Registered, layout: Layout, results: list) -> Any:
        try:
            return registered.collect(layout, results)
        except ValueError as error:
            error.add_note(f"in the results of {self.name}.{method}()")
            raise

    def _bind(self, method: str, registered: Registered) -> Callable:
        original = inspect.getattr_static(self.worker_class, method)

        def call(*args: Any, **kwargs: Any) -> Any:
            future = self.submit(method, *args, **kwargs)
            return future.get() if registered.blocking else future

        # updated=(): functools.wraps would also copy the mark of @register, which belongs to the worker's method.
        return functools.update_wrapper(call, original, updated=())

    def _unknown_method(self, method: str) -> str:
        return (
            f"{self.worker_class.__name__} registers no method {method!r} (mark it with @register): "
            f"{did_you_mean(method, self._methods)}"
        )

    def __getattr__(self, name: str) -> Any:  # called only for names that do not exist
        raise AttributeError(name if name.startswith("_") else self._unknown_method(name))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name}, {self.worker_class.__name__}, world_size={self.world_size})"

    def __enter__(self) -> "WorkerGroup":
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self.shutdown()
