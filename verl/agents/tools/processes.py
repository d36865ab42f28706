"""Tools in worker processes: calls with deadlines, also for tools that block or crash.

    tools = ToolProcesses(settings, size=4)
    observation = await tools.call("trajectory 7", "execute", {"name": "add", "parameters": {"a": 1}, "kwargs": {}}, 30)

All calls of a trajectory run in one process, which holds its instances, in an event loop that it shares with other
trajectories. A call that exceeds its time limit is cancelled; if it cannot be cancelled, the process is killed and
started again. Calls of functions that were lost with it are repeated one at a time in a separate process, so that
only the call at fault fails. Instances of classes are lost with their process, and their next call says so.
"""

import asyncio
import itertools
import math
import pickle
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from verl.agents.tools.function_tool import FunctionTool
from verl.agents.tools.host import ToolFailure, ToolSettings, late
from verl.agents.tools.load import describe, load_tools
from verl.processes.child import EXIT_SECONDS, START_SECONDS, HelperProcess, describe_exit

_GRACE_SECONDS = 1.0  # for a worker to report a timeout itself
_POLL_SECONDS = 0.25


class _Lost(ToolFailure):
    """The process of a call has ended."""


@dataclass
class _Call:
    """A call of a slot. Its time limit counts from its start."""

    method: str
    arguments: dict[str, Any]
    seconds: float | None
    future: "Future[Any]" = field(default_factory=Future)
    deadline: float = math.inf  # when the process is killed
    generation: int | None = None  # of the process that ran the call to its end; None if the call was stopped


class _Slot:
    """A worker process that is started on demand, again after it has ended."""

    def __init__(self, settings: ToolSettings, one_at_a_time: bool = False):
        self._settings, self._one_at_a_time = settings, one_at_a_time
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._waiting: deque[_Call] = deque()
        self._running: dict[int, _Call] = {}
        self._process: HelperProcess | None = None
        self._is_ready = self._is_closed = False
        self.generation = 0  # number of processes that have ended
        self.users = 0  # trajectories that use it

    def submit(self, call: _Call) -> "Future[Any]":
        with self._lock:
            self._waiting.append(call)
            if self._process is None:
                self._start()
            self._send_waiting()
        return call.future

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            if self._process is not None:
                self._process.kill()

    def _start(self) -> None:
        self._process, self._is_ready = HelperProcess("verl.agents.tools.worker", OMP_NUM_THREADS="1"), False
        self._process.send(pickle.dumps(self._settings))
        threading.Thread(target=self._watch, args=(self._process,), name="tools", daemon=True).start()

    def _send_waiting(self) -> None:
        while self._is_ready and self._waiting and not (self._one_at_a_time and self._running):
            call, number = self._waiting.popleft(), next(self._numbers)
            try:
                message = pickle.dumps((number, call.method, call.arguments, call.seconds))
            except Exception as error:  # pickling runs code of the values' classes
                call.future.set_exception(ToolFailure(f"the arguments cannot be sent: {describe(error)}"))
                continue
            self._running[number] = call
            call.deadline = time.monotonic() + START_SECONDS
            self._process.send(message)

    def _watch(self, process: HelperProcess) -> None:
        """In a thread: read the replies of a process until it ends, and kill it at a deadline."""
        broken, lost, is_late, started = None, None, False, time.monotonic()
        try:
            while broken is None and not is_late:
                if (message := process.receive(_POLL_SECONDS)) is not None:
                    broken = self._read(*message)
                with self._lock:
                    is_late = any(call.deadline <= time.monotonic() for call in self._running.values())
                    if not self._is_ready and time.monotonic() - started > START_SECONDS:
                        broken = f"not loaded within {START_SECONDS:g} s"
        except EOFError:
            pass
        except Exception as error:  # unpickling runs code of the values' classes
            lost = f"sent a result that cannot be read: {describe(error)}"
        status = process.end(0.0 if broken or lost or is_late else EXIT_SECONDS)
        if broken is None and not self._is_ready and not self._is_closed:
            broken = f"the process {describe_exit(status)} while it started"
        self._end(lost or describe_exit(status), is_late, broken)

    def _read(self, kind: str, *content: Any) -> str | None:
        """Handle one message. Returns why the process cannot load its tools, if it says so."""
        if kind == "ready":
            with self._lock:
                self._is_ready = True
                self._send_waiting()
            return None
        if kind == "broken":
            return content[0]
        number, *rest = content
        with self._lock:
            if kind == "started":
                call = self._running[number]
                call.deadline = math.inf if call.seconds is None else time.monotonic() + call.seconds + _GRACE_SECONDS
                return None
            if kind == "late" and rest[0]:  # it still runs
                self._running[number].deadline = 0.0
                return None
            call = self._running.pop(number)
            call.generation = None if kind == "late" else self.generation
            self._send_waiting()
        if kind == "value":
            call.future.set_result(rest[0])
        else:
            call.future.set_exception(_late(call) if kind == "late" else ToolFailure(rest[0]))
        return None

    def _end(self, reason: str, is_late: bool, broken: str | None) -> None:
        """Report the calls that the process has not finished, and start it again for those that wait. reason: why they
        are lost, after "the process"; is_late: at the deadline of a call; broken: why no process can run the tools."""
        now = time.monotonic()
        with self._lock:
            calls, self._running = list(self._running.values()), {}
            self._process, self._is_ready = None, False
            self.generation += 1
            if broken is not None:
                calls += self._waiting
                self._waiting.clear()
            elif self._waiting and not self._is_closed:
                self._start()
                self._send_waiting()
        for call in calls:
            if broken is not None:
                error: Exception = ValueError(f"the tools cannot be loaded in a worker process: {broken}")
            elif is_late and call.deadline <= now:
                error = _late(call)
            else:
                error = _Lost(f"the process {reason}")
            call.future.set_exception(error)


def _late(call: _Call) -> ToolFailure:
    return late(START_SECONDS if call.seconds is None else call.seconds)


class ToolProcesses:
    """A `ToolRunner` with `size` worker processes."""

    def __init__(self, settings: ToolSettings, size: int):
        if size < 1:
            raise ValueError(f"tool processes: expected at least 1, found {size}")
        # loaded here too: errors of the files are found before the first call
        self._tools = load_tools(settings.tool_config_path, settings.function_tool_path)
        self._slots = [_Slot(settings) for _ in range(size)]
        self._repeats = _Slot(settings, one_at_a_time=True)
        self._home: dict[str, _Slot] = {}
        self._state: dict[str, int] = {}  # trajectory -> generation of the process with its instances
        slots = [*self._slots, self._repeats]
        self._finalizer = weakref.finalize(self, lambda: [slot.close() for slot in slots])

    async def call(self, trajectory: str, method: str, arguments: Mapping[str, Any], seconds: float | None) -> Any:
        if trajectory not in self._home:
            self._home[trajectory] = min(self._slots, key=lambda slot: slot.users)
            self._home[trajectory].users += 1
        slot = self._home[trajectory]
        is_function = method == "execute" and isinstance(self._tools.get(arguments["name"]), FunctionTool)
        if not is_function and self._state.get(trajectory, slot.generation) != slot.generation:
            del self._state[trajectory]
            raise ToolFailure("the process of the tool has ended, and the state of this trajectory is lost")
        call = _Call(method, {"trajectory": trajectory, **arguments}, seconds)
        try:
            return await asyncio.wrap_future(slot.submit(call))
        except _Lost:
            if not is_function:
                raise
            return await asyncio.wrap_future(self._repeats.submit(_Call(method, call.arguments, seconds)))
        finally:
            if not is_function and call.generation is not None:
                self._state[trajectory] = call.generation

    def forget(self, trajectory: str) -> None:
        self._state.pop(trajectory, None)
        if (slot := self._home.pop(trajectory, None)) is not None:
            slot.users -= 1

    def close(self) -> None:
        self._finalizer()
