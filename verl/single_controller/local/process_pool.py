"""ProcessPool: n processes of this host, each with one worker per role.

A monitor thread of this process reads the replies and watches the processes:

- If one rank raises, the other ranks, which may be waiting for it in a collective, are killed immediately, and the
  caller gets the error of the rank that failed first.
- If a process dies, the error names it within a fraction of a second, with the signal or exit status.
- If a call takes longer than its limit, the error names the rank that it waits for, and has the stacks of all ranks.
- The processes end with this one, however it ends.

After any of these failures the state of the workers is unknown, so the pool stops: later calls raise the reason.
"""

import atexit
import concurrent.futures
import logging
import os
import resource
import selectors
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from rich.text import Text

from verl.dataflow.operator import running_operator
from verl.processes.child import Channel, ChildProcess, PythonProcess, process_status
from verl.processes.fork_server import ForkServerError, server_for
from verl.processes.limits import Durations, Limits
from verl.single_controller.cluster import visible_devices
from verl.single_controller.dispatch import Call
from verl.single_controller.local.transport import Kind, Message, Parcel, call_parcel, load_result, receive
from verl.single_controller.remote_batch import pack
from verl.single_controller.worker import RankEnv, WorkerSpec, free_port
from verl.single_controller.worker_group import (
    CallWatch,
    Failure,
    Future,
    RankState,
    WorkerDied,
    WorkerError,
    WorkerTimeout,
    first_error,
    record_span,
    timeout_error,
)
from verl.utils import log
from verl.utils.redaction import console_text, secrets_of_settings

logger = logging.getLogger(__name__)

_WORKER_MODULE = "verl.single_controller.local.worker_main"
_LIBRARIES = ("tensordict", "transformers.models.auto.modeling_auto", "transformers.modeling_utils")  # used by workers
_POLL_SECONDS = 0.1  # between two checks of exits and deadlines
_SETTLE_SECONDS = 0.25  # after a failure, to collect others: the first one is the cause
_SHUTDOWN_SECONDS = 5.0  # for a process to end by itself after STOP


@dataclass
class _Rank:
    """The process of one rank, and the channel to it."""

    rank: int
    process: ChildProcess
    channel: Channel
    exit_reported: bool = False


@dataclass
class _PendingCall:
    """A call that has not finished."""

    role: str
    method: str
    watch: CallWatch
    waiting: set[int]  # ranks that have not replied
    replies: dict[int, Message] = field(default_factory=dict)
    done: threading.Event = field(default_factory=threading.Event)
    error: WorkerError | None = None
    # when the processes began to work on it, as far as the pool knows; None while it is queued
    started: float | None = None


class ProcessPool:
    """`n` processes with one worker per role. The workers are constructed when `__init__` returns.

    Args:
        timeout: Seconds that a call, or the construction of the workers, may take; or limits by measured durations.
        devices: Indices of the visible GPUs, rank i uses the i-th of them; None leaves CUDA_VISIBLE_DEVICES unchanged.

    Raises:
        WorkerError: A worker could not be constructed.
    """

    def __init__(
        self,
        specs: Mapping[str, WorkerSpec],
        n: int,
        *,
        timeout: float | Limits,
        devices: Sequence[int] | None = None,
        env: Mapping[str, str] | None = None,
    ):
        self.roles = set(specs)
        self.durations = Durations(timeout)
        self._lock = threading.Lock()
        self._pending: dict[int, _PendingCall] = {}
        self._num_calls = 0
        self._fatal: WorkerError | None = None
        self._failures: list[Failure] = []
        self._settled_at: float | None = None
        self._ranks: list[_Rank] = []
        self._selector = selectors.DefaultSelector()
        # A pipe without a writer but this process: its end of file tells the children that this process is gone.
        self._lifeline, self._lifeline_writer = os.pipe()
        if sys.platform == "linux":  # each result with large columns is an open file (`column_files`)
            _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
        port = free_port()
        rank_envs = [RankEnv(rank, n, rank, n, master_port=port) for rank in range(n)]
        environments = [_environment(rank_env, devices, env or {}) for rank_env in rank_envs]
        # The driver of a GPU does not survive a fork.
        can_fork = sys.platform == "linux" and devices is None and not torch.accelerator.is_available()
        # Modules of users are imported by each process, as they may start threads.
        modules = {spec.cls.__module__ for spec in specs.values() if isinstance(spec.cls, type)}
        preload = [*_LIBRARIES, *sorted(name for name in modules if name.startswith("verl."))] if can_fork else None
        started: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(
            target=self._monitor, args=(environments, preload, started), name="worker monitor", daemon=True
        )
        self._thread.start()
        atexit.register(self.stop)
        try:
            started.result()
            secrets = secrets_of_settings()  # read before the specs are unpacked, which may write and raise
            messages = [(Kind.START, Parcel((secrets, pack((dict(specs), rank_env))))) for rank_env in rank_envs]
            self._send_all("+".join(specs), "__init__", messages).get()
        except BaseException:
            self.stop()
            raise

    # ---- calls ----------------------------------------------------------------------------------------------------

    def call(self, role: str, method: str, calls: list[Call | None]) -> Future[list]:
        """Run `method` of `role` on every rank that has a Call; results in rank order."""
        parcels: dict[tuple, Parcel] = {}  # packed once for all ranks with the same arguments
        messages: list[tuple[Kind, Parcel] | None] = [None] * len(calls)
        for rank, call in enumerate(calls):
            if call is not None:
                key = (id(call.args), id(call.kwargs), call.padding)
                if key not in parcels:
                    parcels[key] = call_parcel(role, method, call)
                messages[rank] = (Kind.CALL if call.collect else Kind.SILENT_CALL, parcels[key])
        return self._send_all(role, method, messages)

    def _send_all(self, role: str, method: str, messages: Sequence[tuple[Kind, Parcel] | None]) -> Future[list]:
        """Send one message to each rank that has one."""
        outgoing = [(rank, *message) for rank, message in zip(self._ranks, messages) if message is not None]
        watch = CallWatch(self.durations, role, method, running_operator())
        pending = _PendingCall(role, method, watch, {rank.rank for rank, _, _ in outgoing})
        with self._lock:  # all ranks must get the calls of all threads in the same order, or their collectives mismatch
            if self._fatal is not None:
                reason = f"not called, since its processes were stopped: {str(self._fatal).splitlines()[0]}"
                raise WorkerError(reason, role, method, self._fatal.rank) from self._fatal
            if not self.roles:
                raise WorkerError("not called, since the group was shut down", role, method, 0)
            self._num_calls += 1
            if not self._pending:
                pending.started = time.monotonic()
            self._pending[self._num_calls] = pending
            for rank, kind, parcel in outgoing:
                with suppress(ConnectionError):  # the process has ended; the monitor sees it and fails this call
                    parcel.send(rank.channel, kind, self._num_calls)
        return Future(lambda timeout: self._result(pending, len(messages), timeout))

    def _result(self, pending: _PendingCall, n: int, timeout: float | None) -> list:
        if not pending.done.wait(timeout):
            raise TimeoutError(f"{pending.role}.{pending.method}() has not finished after {timeout} s")
        if pending.error is not None:
            raise pending.error
        results: list = [None] * n
        for rank, message in pending.replies.items():
            results[rank], span = load_result(message)
            record_span(socket.gethostname(), self._ranks[rank].process.pid, rank, pending.role, pending.method, *span)
        return results

    # ---- the monitor thread -----------------------------------------------------------------------------------------

    def _monitor(
        self, environments: list[dict[str, str]], preload: list[str] | None, started: concurrent.futures.Future
    ) -> None:
        """Start the processes, watch them, and end them when no role is left or one of them has failed."""
        try:
            output = _relay_output()
            try:
                for rank, env in enumerate(environments):
                    self._ranks.append(self._start_rank(rank, env, preload, output))
                    self._selector.register(self._ranks[-1].channel, selectors.EVENT_READ, self._ranks[-1])
            finally:
                for descriptor in output:
                    os.close(descriptor)
            started.set_result(None)
            while self.roles and self._fatal is None:
                self._poll()
        except BaseException as error:  # pass it to the caller, which would otherwise wait for replies without end
            if not started.done():
                started.set_exception(error)
            self._fatal = WorkerError.from_exception(error, "(monitor of the processes)", "", 0)
        finally:
            self._close()

    def _start_rank(self, rank: int, env: dict[str, str], preload: list[str] | None, output: list[int]) -> _Rank:
        """Start a process: forked from a server that has imported `preload`; None for a fresh interpreter."""
        channel, theirs = Channel.pair()
        with theirs:
            start = {"module": _WORKER_MODULE, "inherited": (theirs.fileno(), self._lifeline, *output), "env": env}
            if preload is not None:
                try:
                    server = server_for(env)
                    process = server.start(**start, reports=True, preload=preload, cancelled=lambda: not self.roles)
                    return _Rank(rank, process, channel)
                except ForkServerError as error:
                    logger.warning("each worker process imports its libraries itself, which takes seconds: %s", error)
            return _Rank(rank, PythonProcess(**start, reports=True), channel)

    def _poll(self) -> None:
        for key, _ in self._selector.select(_POLL_SECONDS):
            self._read_reply(key.data)
        self._check_exits()
        self._check_deadlines()
        if self._settled_at is not None and time.monotonic() >= self._settled_at:
            self._fatal = self._first_error()

    def _read_reply(self, rank: _Rank) -> None:
        try:
            message = receive(rank.channel)
        except (EOFError, OSError):  # the process is ending; `_check_exits` reports how
            self._selector.unregister(rank.channel)
            return
        if message.kind is Kind.FAILURE:
            self._add_failure(1, *message.load())
            return
        if self._failures:  # the pool is about to stop: a result that arrives now must not hide the failure
            return
        with self._lock:
            pending = self._pending[message.call_id]
            pending.replies[rank.rank] = message
            pending.waiting.remove(rank.rank)
            if not pending.waiting:
                del self._pending[message.call_id]
                if pending.started is not None:
                    pending.watch.record(time.monotonic() - pending.started)
                for following in list(self._pending.values())[:1]:
                    following.started = following.started or time.monotonic()
                pending.done.set()

    def _check_exits(self) -> None:
        for rank in self._ranks:
            message = None if rank.exit_reported else rank.process.exit_message()
            if message is not None:
                rank.exit_reported = True
                self._add_failure(0, time.monotonic(), WorkerDied(message, *self._current_call(rank.rank), rank.rank))

    def _current_call(self, rank: int) -> tuple[str, str]:
        """Role and method that a rank is running."""
        with self._lock:
            pending = next((p for p in self._pending.values() if rank in p.waiting), None)
        return (pending.role, pending.method) if pending is not None else ("+".join(sorted(self.roles)), "(no call)")

    def _check_deadlines(self) -> None:
        with self._lock:
            pending = next(iter(self._pending.values()), None)
        if pending is None or self._failures:
            return
        watch = pending.watch
        seconds = watch.elapsed.tick(time.monotonic())
        if seconds < watch.limit.seconds:
            return
        late = sorted(pending.waiting)
        message = watch.no_reply_message(f"{watch.limit.seconds:g} s", late, pending.replies)
        self._add_failure(2, time.monotonic(), WorkerTimeout(message, pending.role, pending.method, late[0]))

    def _state(self, rank: _Rank, busy: bool) -> RankState:
        pid = rank.process.pid
        return RankState(rank.rank, pid, socket.gethostname(), process_status(pid), busy)

    def _add_failure(self, order: int, when: float, error: WorkerError) -> None:
        """Record a failure. `_first_error` is determined after `_SETTLE_SECONDS`."""
        self._failures.append((order, when, error))
        if self._settled_at is None:
            self._settled_at = time.monotonic() + _SETTLE_SECONDS
            if order > 0:
                for rank in self._ranks:
                    rank.process.request_stacks()  # they are written during `_SETTLE_SECONDS`

    def _first_error(self) -> WorkerError:
        """The error of the pool. A rank that is stopped is the cause of errors in the collectives of others."""
        error = first_error(self._failures)
        with self._lock:
            waiting = next((p.waiting for p in self._pending.values()), set())
        states = [self._state(rank, rank.rank in waiting) for rank in self._ranks if not rank.exit_reported]
        if isinstance(error, WorkerTimeout):
            return self._diagnosed(states, error, error.message)
        if not isinstance(error, WorkerDied) and any(state.is_stopped for state in states):
            diagnosed = self._diagnosed(states, error, f"rank {error.rank} raised {error.message.splitlines()[0]}")
            diagnosed.__notes__ = getattr(error, "__notes__", [])
            return diagnosed
        return error

    def _diagnosed(self, states: Sequence[RankState], error: WorkerError, waited: str) -> WorkerTimeout:
        stacks = {rank.rank: rank.process.read_stacks() for rank in self._ranks}
        return timeout_error(states, stacks, error.role, error.method, waited)

    # ---- shutdown -------------------------------------------------------------------------------------------------

    def release(self, role: str) -> None:
        """Release a role. The processes stop when the last role is released."""
        self.roles.discard(role)
        if not self.roles:
            self.stop()

    def stop(self) -> None:
        """Stop the processes: idle ones are asked to end, ones with a running call are killed."""
        self.roles.clear()
        self._thread.join()
        atexit.unregister(self.stop)

    def _close(self) -> None:
        """End the processes, free all resources and fail the calls that are still pending."""
        with self._lock:
            interrupted, self._pending = list(self._pending.values()), {}
        if not interrupted and self._fatal is None:
            self._send_shutdown()
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            rank.process.close()
            rank.channel.close()
        self._selector.close()
        os.close(self._lifeline)
        os.close(self._lifeline_writer)
        for pending in interrupted:
            reason = "the group was shut down during the call"
            pending.error = self._fatal or WorkerError(reason, pending.role, pending.method, min(pending.waiting))
            pending.done.set()

    def _send_shutdown(self) -> None:
        """Ask the processes to end by themselves, and wait for them."""
        deadline = time.monotonic() + _SHUTDOWN_SECONDS
        for rank in self._ranks:
            with suppress(OSError):  # the process has ended
                Parcel(None).send(rank.channel, Kind.STOP, 0)
        for rank in self._ranks:
            with suppress(ChildProcessError):  # its fork server has ended
                rank.process.wait(max(deadline - time.monotonic(), 0))


def _relay_output() -> list[int]:
    """The descriptor for the output of the workers, which the caller closes; none if they keep that of this process.

    On a terminal with a live panel, their lines are printed above it instead of through it.
    """
    if not log.is_live(log.console()):
        return []
    reader, writer = os.pipe()
    threading.Thread(target=_print_lines, args=(reader,), name="output of workers", daemon=True).start()
    return [writer]


def _print_lines(reader: int) -> None:
    with open(reader, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            log.console().print(Text(console_text(Text.from_ansi(line.rstrip("\n")).plain)), soft_wrap=True)


def _environment(rank_env: RankEnv, devices: Sequence[int] | None, env: Mapping[str, str]) -> dict[str, str]:
    """The environment of one process: that of this one, its rank, its devices, and its share of the CPU cores."""
    env = {**os.environ, **env, **rank_env.env}
    if "OMP_NUM_THREADS" not in env:
        env["OMP_NUM_THREADS"] = str(max(1, torch.get_num_threads() // rank_env.local_world_size))
    if devices is not None:
        env["CUDA_VISIBLE_DEVICES"] = visible_devices(devices, os.environ.get("CUDA_VISIBLE_DEVICES"))
    return env
