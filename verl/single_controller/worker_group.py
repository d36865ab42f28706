"""WorkerGroup: a Worker class over n ranks, called like one object.

Every registered method of the class becomes a method of the group: dispatch -> execute -> collect. Groups differ in
`execute` alone: in this process, in processes of this host, or in Ray actors.
"""

import functools
import inspect
import os
import socket
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from types import TracebackType
from typing import Any, Generic, TypeVar

from verl.registry import did_you_mean
from verl.single_controller.dispatch import Call, Dispatch, Layout, Registered, registered_methods
from verl.single_controller.worker import Worker

T = TypeVar("T")

CALL_TIMEOUT = 3600.0  # seconds that one call may take in another process


class WorkerError(RuntimeError):
    """A call failed on a worker in another process; the message ends with the traceback of that process.

    role, rank, host, method: where. traceback: the worker's own traceback as text.
    """

    def __init__(self, message: str, role: str, method: str, rank: int, host: str = "", traceback: str = ""):
        host = host or socket.gethostname()
        super().__init__(message, role, method, rank, host, traceback)
        self.message, self.role, self.method, self.rank = message, role, method, rank
        self.host, self.traceback = host, traceback

    @classmethod
    def of(cls, error: BaseException, role: str, method: str, rank: int) -> "WorkerError":
        """What the caller is told of an error of this process: text only, since it may not have the error's class."""
        stack = error.__traceback__
        while stack is not None and stack.tb_next is not None and _is_executor(stack):
            stack = stack.tb_next  # the worker's own code is what the user wants to see
        text = "".join(traceback.format_exception(type(error), error, stack))
        return cls(f"{type(error).__name__}: {error}", role, method, rank, traceback=text)

    def __str__(self) -> str:
        where = f"{self.role}.{self.method}() on rank {self.rank} ({self.host}): {self.message}"
        return f"{where}\n\n{self.traceback.rstrip()}" if self.traceback else where


def _is_executor(stack: TracebackType) -> bool:
    return os.path.dirname(stack.tb_frame.f_code.co_filename) == os.path.dirname(__file__)


class WorkerDied(WorkerError):
    """The process of a worker ended while a call was under way."""


class WorkerTimeout(WorkerError):
    """A call took longer than its deadline; `traceback` holds the stacks of all threads of all ranks."""


Trouble = tuple[int, float, WorkerError]
"""An error that an executor heard of: its order, when it happened, and itself. What comes first is the cause: a death
(order 0) before the exceptions (1) that it leads to on other ranks, an earlier exception before a later one, and both
before a timeout (2)."""


def first_error(troubles: Sequence[Trouble]) -> WorkerError:
    """The error to show; those that came after it stand in a note."""
    (_, _, error), *later = sorted(troubles, key=lambda trouble: trouble[:2])
    if later:
        error.add_note("\n".join(["after it came:", *("  " + str(e).splitlines()[0] for _, _, e in later)]))
    return error


class Future(Generic[T]):
    """The result of a call that may still be under way."""

    def __init__(self, wait: Callable[[float | None], T]):
        """wait(timeout in seconds or None) returns the result, raises the call's error, or raises TimeoutError."""
        self._wait = wait
        self._outcome: Callable[[], T] | None = None

    @classmethod
    def of(cls, value: T) -> "Future[T]":
        """A result that is there already."""
        return cls(lambda timeout: value)

    def get(self, timeout: float | None = None) -> T:
        """Wait for the result. Raises TimeoutError after `timeout` seconds (it may be asked again then), or the error
        of the call."""
        if self._outcome is None:
            try:
                value = self._wait(timeout)
            except TimeoutError:
                raise
            except Exception as error:
                self._outcome = functools.partial(_raise, error)
            else:
                self._outcome = lambda: value
            self._wait = None
        return self._outcome()

    def then(self, function: Callable[[T], Any]) -> "Future":
        """The future of `function(result)`, which runs in the thread that asks."""
        return Future(lambda timeout: function(self.get(timeout)))


def _raise(error: Exception) -> None:
    raise error


class WorkerGroup(ABC):
    """A Worker class over `world_size` ranks. `group.method(...)` calls the registered method of every rank."""

    def __init__(self, worker_class: type[Worker], world_size: int, name: str | None = None):
        """name: the role, as errors call it; the class's name when there is none."""
        self.worker_class = worker_class
        self.world_size = world_size
        self.name = name or worker_class.__name__
        self._layouts: dict[str | None, Layout] = {}
        self._methods = registered_methods(worker_class)
        for method, how in self._methods.items():
            if method in dir(WorkerGroup):
                raise ValueError(
                    f"{worker_class.__name__}.{method}() cannot be registered: a worker group has a {method!r} of its "
                    f"own; choose another name"
                )
            setattr(self, method, self._bind(method, how))

    @abstractmethod
    def execute(self, method: str, calls: list[Call | None]) -> Future[list]:
        """Run `method` of every rank that has a Call; the results in rank order (None for a rank without one).

        The result of a Call is what `Call.finish` makes of it.
        """

    @property
    def processes(self) -> Hashable | None:
        """Stands for the processes that the workers live in, the same for groups that share them; None: this one."""
        return None

    def shutdown(self) -> None:  # noqa: B027
        """End the group, which cannot be used afterwards. One without processes has nothing to end."""

    def layout(self, mesh: str | None = None) -> Layout:
        """The coordinates of all ranks in one mesh, as the workers report them. Asked once, at the first use."""
        if mesh not in self._layouts:
            calls = [Call((mesh,)) for _ in range(self.world_size)]
            self._layouts[mesh] = Layout(tuple(self.execute("layout", calls).get()))
        return self._layouts[mesh]

    def submit(self, method: str, *args: Any, **kwargs: Any) -> Future:
        """Start a registered method, whatever its `blocking` says, and return the Future of its result."""
        if method not in self._methods:
            raise ValueError(self._unknown(method))
        how = self._methods[method]
        # the modes below ask for no coordinates, so they work before a worker has set up its mesh (init_model)
        anywhere = how.dispatch_mode in (Dispatch.RANK_ZERO, Dispatch.ONE_TO_ALL, Dispatch.ALL_TO_ALL)
        layout = Layout.grid(dp=self.world_size) if anywhere else self.layout(how.mesh)
        try:
            calls = how.dispatch(layout, args, kwargs)
        except ValueError as error:
            error.add_note(f"in the arguments of {self.name}.{method}()")
            raise
        return self.execute(method, calls).then(functools.partial(self._collect, method, how, layout))

    def _collect(self, method: str, how: Registered, layout: Layout, results: list) -> Any:
        try:
            return how.collect(layout, results)
        except ValueError as error:
            error.add_note(f"in the results of {self.name}.{method}()")
            raise

    def _bind(self, method: str, how: Registered) -> Callable:
        original = inspect.getattr_static(self.worker_class, method)

        def call(*args: Any, **kwargs: Any) -> Any:
            future = self.submit(method, *args, **kwargs)
            return future.get() if how.blocking else future

        # functools.wraps would also hand on the mark, which belongs to the worker's method
        return functools.update_wrapper(call, original, updated=())

    def _unknown(self, method: str) -> str:
        return (
            f"{self.worker_class.__name__} registers no method {method!r} (mark it with @register): "
            f"{did_you_mean(method, self._methods)}"
        )

    def __getattr__(self, name: str) -> Any:
        # only reached for a name that is not there: say which ones are
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(self._unknown(name))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name}, {self.worker_class.__name__}, world_size={self.world_size})"

    def __enter__(self) -> "WorkerGroup":
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self.shutdown()
