"""RayPool: the actors of a resource pool, as the controller sees them.

Errors, crashes and hangs are reported as by `local.process_pool`. Batches are passed by reference (`remote_batch`):
rows go from the rank that produced them to the ranks that need them, and the controller receives a large column only
if an operator reads it.
"""

import contextlib
import functools
import math
import os
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
import torch
from psutil import STATUS_DEAD, STATUS_ZOMBIE
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayError
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from verl.dataflow.operator import running_operator
from verl.processes.child import process_status
from verl.processes.limits import Durations, Limits
from verl.single_controller.cluster import ResourcePool
from verl.single_controller.dispatch import Call
from verl.single_controller.ray.placement import START_TIMEOUT, reserve
from verl.single_controller.ray.rank_actor import ActorInfo, RankActor, StoredRows
from verl.single_controller.remote_batch import ColumnRef, PackedCall, Source, nbytes, unpack, unpack_result
from verl.single_controller.worker import RankEnv, WorkerSpec
from verl.single_controller.worker_group import (
    CALL_TIMEOUT,
    SILENT_SECONDS,
    CallWatch,
    Failure,
    Future,
    NodeLost,
    RankState,
    WorkerDied,
    WorkerError,
    WorkerTimeout,
    first_error,
    timeout_error,
)

_SETTLE_SECONDS = 0.25  # after a failure, to collect others: the first one is the cause
_SHUTDOWN_SECONDS = 5.0  # for an actor to end by itself, or to report its progress
_ASK_SECONDS = 5.0  # between two heartbeats that are asked for
_STATUS_SECONDS = 15.0  # for a node to start a process that reads the state of another
_WAIT_SECONDS = 1.0  # one wait for replies; heartbeats are checked between two
#: how long a call survives a cut of the link; Ray's own limit for the process that replies is 20 s
CONNECTION_LIMIT = {"RAY_grpc_keepalive_timeout_ms": "60000"}
_MAX_INLINE_BYTES = 1 << 16  # larger arguments are put into the object store once for all ranks


@dataclass
class _Rank:
    """The actor of one rank.

    Attributes:
        actor: Ray's handle.
        info: Where it runs; set by `_rank_environments`.
        dropped: Keys in its ColumnStore that the controller no longer refers to.
    """

    rank: int
    actor: Any
    info: ActorInfo | None = None
    dropped: deque[int] = field(default_factory=deque)

    def rows(self, key: int, names: list[str], rows: torch.Tensor) -> ray.ObjectRef:
        return self.actor.pack_rows.options(concurrency_group="data").remote(key, names, rows)


class _RemoteSource(Source):
    """A batch in the ColumnStore of a rank. It is dropped there when this object is garbage-collected."""

    def __init__(self, rank: _Rank, key: int):
        self.rank, self.key = rank, key
        # Only recorded here: finalizers run at arbitrary points, where Ray must not be called.
        weakref.finalize(self, rank.dropped.append, key).atexit = False

    def fetch(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        try:
            return unpack(ray.get(self.rank.rows(self.key, [name], rows)))[name]
        except RayActorError as error:
            message = f"column {name!r} was lost with the process that held it"
            raise WorkerDied(message, "", "", self.rank.rank, self.rank.info.host, str(error)) from None


class _Arguments:
    """The arguments of one or more ranks: packed, stored and fetched once."""

    def __init__(self, call: Call):
        packed = PackedCall((call.args, call.kwargs))
        self._refs = packed.refs
        self._content = ray.put(packed.packed) if nbytes(packed.packed) > _MAX_INLINE_BYTES else packed.packed
        self._sent: dict[int, ray.ObjectRef] = {}

    def gather(self, to: _Rank) -> list[ray.ObjectRef | StoredRows]:
        """Start sending the rows that a rank needs. Rows in its own ColumnStore stay there."""
        return [self._rows(to, number, ref) for number, ref in enumerate(self._refs)]

    def _rows(self, to: _Rank, number: int, ref: ColumnRef) -> ray.ObjectRef | StoredRows:
        source: _RemoteSource = ref.source
        if source.rank is to:
            return StoredRows(source.key, ref.names, ref.rows)
        if number not in self._sent:
            self._sent[number] = source.rank.rows(source.key, ref.names, ref.rows)
        return self._sent[number]

    def run(self, on: _Rank, role: str, method: str, call: Call, rows: list) -> ray.ObjectRef:
        return on.actor.run.remote(role, method, self._content, call.padding, call.collect, *rows)


@dataclass
class _PendingCall:
    """A call that has not finished. `calls` keeps the columns alive that the ranks still have to read."""

    role: str
    method: str
    refs: dict[ray.ObjectRef, int]
    calls: list[Call | None]
    watch: CallWatch
    deadline: float
    replies: dict[int, Any] = field(default_factory=dict)

    def is_done(self) -> bool:
        refs = list(self.refs)  # a copy: the thread that waits for the call removes them one by one
        return not refs or not ray.wait(refs, num_returns=len(refs), timeout=0)[1]


class Heartbeats:
    """The time of the last response of each actor (Ray's handles, in rank order), which is asked for during a wait.

    An actor that does not respond has no thread that can run Python code.
    """

    def __init__(self, actors: Sequence[Any]):
        self._actors = actors
        self._lock = threading.Lock()
        self._requests: dict[int, tuple[ray.ObjectRef | None, float]] = {}  # rank -> heartbeat in flight, and its time
        self._heard: set[int] = set()

    def ask(self, now: float) -> None:
        """Collect the heartbeats that have arrived, and ask for the next ones. Does not wait."""
        with self._lock:
            for rank, actor in enumerate(self._actors):
                ref, asked_at = self._requests.get(rank, (None, now - _ASK_SECONDS))
                if ref is not None and ray.wait([ref], timeout=0)[0]:
                    self._heard.add(rank)
                    ref = None
                if ref is None and now - asked_at >= _ASK_SECONDS:
                    ref, asked_at = actor.beat.options(concurrency_group="control").remote(), now
                self._requests[rank] = ref, asked_at

    def heard(self, rank: int) -> None:
        with self._lock:
            self._heard.add(rank)
            self._requests.pop(rank, None)

    def silence(self, rank: int) -> float | None:
        """Seconds since an actor stopped responding; None if it never has responded, and was not asked."""
        with self._lock:
            ref, asked_at = self._requests.get(rank, (None, 0.0))
            if ref is None:
                return 0.0 if rank in self._heard else None
            return time.monotonic() - asked_at

    def status(self, node: str, pid: int) -> str | None:
        """The state of a process, as in psutil, which a process of its node reads; None without a response."""
        on_node = NodeAffinitySchedulingStrategy(node, soft=False)
        task = ray.remote(process_status).options(num_cpus=0, max_retries=0, scheduling_strategy=on_node)
        with contextlib.suppress(RayError):
            return ray.get(task.remote(pid), timeout=_STATUS_SECONDS)
        return None


class RayPool:
    """The processes of a resource pool: one actor per process, with one worker per role.

    The ranks of a node are consecutive. LOCAL_RANK counts on each node. With `use_gpu` all ranks of a node see the GPUs
    that Ray assigned to them together, and rank LOCAL_RANK uses GPU LOCAL_RANK, as with torchrun.

    Args:
        resources: Number of processes on each node.
        use_gpu: Request one GPU per process.
        timeout: Seconds that a call, or the construction of the workers, may take; or limits by measured durations.
        start_timeout: Seconds in which the cluster must start the processes.
        env: Additional environment variables of the processes.
        placement: Placement group that `reserve` returned for `resources`; None to reserve one.

    Raises:
        ValueError: The cluster does not have the resources.
        WorkerError: A worker could not be constructed.
    """

    def __init__(
        self,
        specs: Mapping[str, WorkerSpec],
        resources: ResourcePool,
        *,
        use_gpu: bool = False,
        timeout: float | Limits = CALL_TIMEOUT,
        start_timeout: float = START_TIMEOUT,
        env: Mapping[str, str] | None = None,
        placement: PlacementGroup | None = None,
    ):
        self.roles = set(specs)
        self.durations = Durations(timeout)
        self._lock = threading.Lock()
        self._fatal: WorkerError | None = None
        self._pending: list[_PendingCall] = []
        if placement is None:
            placement = reserve([resources], use_gpu=use_gpu, timeout=start_timeout)[resources]
        self._placement: PlacementGroup | None = placement
        self._ranks = _create_actors(resources, self._placement, use_gpu, env or {})
        self._heartbeats = Heartbeats([rank.actor for rank in self._ranks])
        try:
            environments = _rank_environments(self._ranks, use_gpu, start_timeout)
            refs = {
                r.actor.start.remote(dict(specs), rank_env, env, os.getcwd()): r.rank
                for r, (rank_env, env) in zip(self._ranks, environments)
            }
            self._wait(self._pending_call("+".join(specs), "__init__", refs, []), None)
        except BaseException:
            self.stop()
            raise

    # ---- calls ----------------------------------------------------------------------------------------------------

    def call(self, role: str, method: str, calls: list[Call | None]) -> Future[list]:
        """Run `method` of `role` on every rank that has a Call; results in rank order."""
        if self._fatal is not None:
            reason = f"not called, since its processes were stopped: {str(self._fatal).splitlines()[0]}"
            raise WorkerError(reason, role, method, self._fatal.rank) from self._fatal
        if role not in self.roles:
            raise WorkerError("not called, since the group was shut down", role, method, 0)
        packed: dict[tuple[int, int], _Arguments] = {}
        for call in calls:
            if call is not None and (id(call.args), id(call.kwargs)) not in packed:
                packed[id(call.args), id(call.kwargs)] = _Arguments(call)
        called = [(self._ranks[rank], call) for rank, call in enumerate(calls) if call is not None]
        arguments = [packed[id(call.args), id(call.kwargs)] for _, call in called]
        with self._lock:  # all ranks must get the calls of all threads in the same order, or their collectives mismatch
            self._clean_up()
            # All rows before all calls: a rank must not wait for rows behind a call that waits for its own rows.
            rows = [args.gather(rank) for args, (rank, _) in zip(arguments, called)]
            refs = {
                args.run(rank, role, method, call, r): rank.rank
                for args, (rank, call), r in zip(arguments, called, rows)
            }
            pending = self._pending_call(role, method, refs, calls)
            self._pending.append(pending)

        def results(timeout: float | None) -> list:
            self._wait(pending, timeout)
            unpacked: list[Any] = [None] * len(calls)
            for rank, packed in pending.replies.items():
                unpacked[rank] = unpack_result(
                    packed, functools.cache(functools.partial(_RemoteSource, self._ranks[rank]))
                )
            return unpacked

        return Future(results)

    def _pending_call(self, role: str, method: str, refs: dict[ray.ObjectRef, int], calls: list) -> _PendingCall:
        watch = CallWatch(self.durations, role, method, running_operator())
        return _PendingCall(role, method, refs, calls, watch, time.monotonic() + watch.limit.seconds)

    def _clean_up(self) -> None:
        """Discard finished calls, and drop the columns that are no longer referred to."""
        self._pending = [p for p in self._pending if not p.is_done()]
        for rank in self._ranks:
            keys = [rank.dropped.popleft() for _ in range(len(rank.dropped))]
            if keys:
                rank.actor.drop.options(concurrency_group="data").remote(keys)

    # ---- replies and failures -------------------------------------------------------------------------------------

    def _wait(self, pending: _PendingCall, timeout: float | None) -> None:
        """Receive the replies of all ranks. TimeoutError: after `timeout` seconds; the call can be waited for again.
        WorkerError: a rank failed or died, or the call exceeded its limit; all processes are killed."""
        until = math.inf if timeout is None else time.monotonic() + timeout
        while pending.refs:
            ref = self._next_reply(pending, until)
            if ref is not None:
                failure = self._read_reply(pending, ref)
            elif time.monotonic() >= until:
                raise TimeoutError(f"{pending.role}.{pending.method}() has not finished after {timeout} s")
            else:
                failure = self._check_limits(pending, time.monotonic())
            if failure is not None:
                raise self._stop_after(pending, failure)

    def _next_reply(self, pending: _PendingCall, until: float) -> ray.ObjectRef | None:
        """Wait a moment for a reply. While this process is suspended, the deadline of the call is suspended too."""
        start = time.monotonic()
        remaining = min(until, pending.deadline, start + _WAIT_SECONDS) - start
        ready, _ = ray.wait(list(pending.refs), timeout=max(remaining, 0))
        pending.deadline += max(0.0, time.monotonic() - start - 5 * _WAIT_SECONDS)
        return ready[0] if ready else None

    def _check_limits(self, pending: _PendingCall, now: float) -> Failure | None:
        """The failure of a call that waits for a stopped rank or has exceeded its limit; None if it may continue."""
        if self._is_stopped(pending, now):
            return self._timeout(pending, f"{pending.watch.elapsed.seconds:.0f} s")
        return self._check_deadline(pending) if now >= pending.deadline else None

    def _is_stopped(self, pending: _PendingCall, now: float) -> bool:
        """Ask for heartbeats. Returns whether a rank that has not replied has been stopped for too long."""
        pending.watch.elapsed.tick(now)
        self._heartbeats.ask(now)
        if not pending.watch.is_due:
            return False
        late = sorted(set(pending.refs.values()))
        silent = [rank for rank in late if (self._heartbeats.silence(rank) or 0.0) >= SILENT_SECONDS]
        return bool(silent) and pending.watch.look([self._state(self._ranks[rank]) for rank in silent])

    def _state(self, rank: _Rank, busy: bool = True, responds: bool = False) -> RankState:
        info = rank.info
        status = "running" if responds else self._heartbeats.status(info.node_id, info.pid)
        return RankState(rank.rank, info.pid, info.host_name, status, self._heartbeats.silence(rank.rank), busy)

    def _read_reply(self, pending: _PendingCall, ref: ray.ObjectRef) -> Failure | None:
        """Read one reply; the failure that it reports, if any."""
        rank = pending.refs.pop(ref)
        try:
            succeeded, content, failed_at, seconds = ray.get(ref)
        except RayActorError as error:
            return 0, time.time(), self._died(pending, rank, error)
        except RayError as error:
            return 1, time.time(), WorkerError.from_exception(error, pending.role, pending.method, rank)
        if not succeeded:
            return 1, failed_at, content
        pending.replies[rank] = content
        if not pending.refs:
            pending.watch.record(seconds)
        return None

    def _died(self, pending: _PendingCall, rank: int, error: RayActorError) -> WorkerDied:
        """Name the process that died: the called one, or one that had rows for it."""
        dead = next((r for r in self._ranks if r.info.actor_id == error.actor_id), None)
        if dead is None:
            message = "a process of another pool, which had rows for this call, died"
            return WorkerDied(message, pending.role, pending.method, rank, self._ranks[rank].info.host, str(error))
        details = pending.role, pending.method, dead.rank, dead.info.host, str(error)
        fault = self._node_fault(dead.info, isinstance(error, ActorUnavailableError))
        if fault is not None:
            return NodeLost(fault, *details)
        return WorkerDied("its process died", *details)

    def _node_fault(self, info: ActorInfo, is_unavailable: bool) -> str | None:
        """Why the node of an actor whose connection broke cannot be used; None if it can: the process itself died.

        Args:
            is_unavailable: Ray does not know that the process has ended.
        """
        lost, local = f"its node {info.host} is lost", ray.util.get_node_ip_address()
        node = next(node for node in ray.nodes() if node["NodeID"] == info.node_id)
        try:
            socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), _ASK_SECONDS).close()
        except ConnectionRefusedError:
            return f"{lost}: the host responds, but Ray (the raylet) no longer runs on it"
        except OSError as error:
            return f"network fault: {local} cannot reach {info.host} ({error}): the link is cut, or the host is down"
        if not node["Alive"]:
            return lost
        if is_unavailable and self._heartbeats.status(info.node_id, info.pid) not in (None, STATUS_DEAD, STATUS_ZOMBIE):
            return f"network fault: the connection from {local} to {info.host} broke; its process still runs"
        return None

    def _check_deadline(self, pending: _PendingCall) -> Failure | None:
        """After the deadline: a timeout, or a later deadline if the ranks were still running earlier calls."""
        running = [seconds for rank, (seconds, _) in self._progress().items() if rank in pending.refs.values()]
        running = [seconds for seconds in running if seconds is not None]
        limit = pending.watch.limit.seconds
        if running and max(running) < limit:
            pending.deadline = time.monotonic() + limit - max(running)
            return None
        return self._timeout(pending, f"{limit:g} s")

    def _progress(self) -> dict[int, tuple[float | None, str | None]]:
        """Rank -> seconds of its running call (None: there is none; inf: unknown), and its stacks if it responds."""
        reports = [r.actor.progress.options(concurrency_group="control").remote() for r in self._ranks]
        ray.wait(reports, num_returns=len(reports), timeout=_SHUTDOWN_SECONDS)
        progress: dict[int, tuple[float | None, str | None]] = {}
        for rank, report in enumerate(reports):
            try:
                progress[rank] = ray.get(report, timeout=0)
                self._heartbeats.heard(rank)
            except (GetTimeoutError, RayError):
                progress[rank] = math.inf, None
        return progress

    def _timeout(self, pending: _PendingCall, waited: str) -> Failure:
        late = sorted(pending.refs.values())
        stacks = {rank: stack for rank, (_, stack) in self._progress().items()}
        states = [self._state(r, r.rank in late, responds=stacks[r.rank] is not None) for r in self._ranks]
        stacks = {rank: stack or "(no stacks: the process did not respond)" for rank, stack in stacks.items()}
        message = pending.watch.no_reply_message(waited, late, pending.replies)
        return 2, time.time(), timeout_error(states, stacks, pending.role, pending.method, message)

    def _stop_after(self, pending: _PendingCall, failure: Failure) -> WorkerError:
        """Collect other failures for a moment, kill all processes, and return the first error."""
        failures, until = [failure], time.monotonic() + _SETTLE_SECONDS
        while self._fatal is None and pending.refs and time.monotonic() < until:
            ready, _ = ray.wait(list(pending.refs), timeout=max(until - time.monotonic(), 0))
            failures += [f for f in (self._read_reply(pending, ref) for ref in ready) if f is not None]
        with self._lock:
            if self._fatal is None:
                self._fatal = self._cause(pending, first_error(failures))
                self._kill()
            return self._fatal

    def _cause(self, pending: _PendingCall, error: WorkerError) -> WorkerError:
        """The error of a rank that died or is stopped, if there is one: collectives of others may have failed first."""
        if isinstance(error, WorkerDied | WorkerTimeout):
            return error
        progress = self._progress()  # waits for what Ray knows of ranks that do not respond
        replies = ray.wait(list(pending.refs), num_returns=len(pending.refs), timeout=0)[0] if pending.refs else []
        failures = [failure for failure in (self._read_reply(pending, ref) for ref in replies) if failure is not None]
        died = [failure for failure in failures if isinstance(failure[2], WorkerDied)]
        silent = [rank for rank in self._ranks if progress[rank.rank][1] is None]
        if died:
            cause = first_error(died)
        elif any(self._state(rank).is_stopped for rank in silent):
            cause = self._timeout(pending, "0 s")[2]
        else:
            return error
        cause.add_note(f"rank {error.rank} raised {error.message.splitlines()[0]}")
        return cause

    # ---- shutdown -------------------------------------------------------------------------------------------------

    def release(self, role: str) -> None:
        """Release a role. The processes stop when the last role is released."""
        self.roles.discard(role)
        if not self.roles:
            self.stop()

    def stop(self) -> None:
        """Stop the actors and free their resources: idle actors are asked to end, others are killed."""
        self.roles.clear()
        if not ray.is_initialized() or self._placement is None:
            return
        if self._fatal is None and all(p.is_done() for p in self._pending):
            terminations = [r.actor.__ray_terminate__.remote() for r in self._ranks]
            ray.wait(terminations, num_returns=len(terminations), timeout=_SHUTDOWN_SECONDS)
        self._kill()
        remove_placement_group(self._placement)
        self._placement = None

    def _kill(self) -> None:
        for rank in self._ranks:
            ray.kill(rank.actor)


def _create_actors(
    resources: ResourcePool, group: PlacementGroup, use_gpu: bool, env: Mapping[str, str]
) -> list[_Rank]:
    """The actors in rank order, node by node."""
    actor_class = ray.remote(concurrency_groups={"data": 1, "control": 1})(RankActor)
    # Otherwise Ray shows each process one GPU only, and LOCAL_RANK would not be its index.
    env = {**CONNECTION_LIMIT, **env, **({"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"} if use_gpu else {})}
    ranks = []
    for node, count in enumerate(resources.processes_per_node):
        for _ in range(count):
            actor = actor_class.options(
                num_cpus=1,
                num_gpus=int(use_gpu),
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=node),
                runtime_env={"env_vars": env},
            ).remote()
            ranks.append(_Rank(len(ranks), actor))
    return ranks


def _rank_environments(ranks: list[_Rank], use_gpu: bool, timeout: float) -> list[tuple[RankEnv, dict[str, str]]]:
    """The RankEnv and the environment variables of each rank, given the nodes on which Ray started the actors."""
    try:
        infos: list[ActorInfo] = ray.get([r.actor.info.remote() for r in ranks], timeout=timeout)
    except GetTimeoutError:
        message = f"Ray has not started all {len(ranks)} processes after {timeout:g} s; see its logs for the reason"
        raise WorkerTimeout(message, "", "__init__", 0) from None
    nodes = [info.node_id for info in infos]
    environments = []
    for rank, info in zip(ranks, infos):
        rank.info = info
        local_rank, local_world_size = nodes[: rank.rank].count(info.node_id), nodes.count(info.node_id)
        rank_env = RankEnv(rank.rank, len(ranks), local_rank, local_world_size, infos[0].host, infos[0].port)
        gpus = ",".join(str(gpu) for node_info in infos if node_info.node_id == info.node_id for gpu in node_info.gpus)
        environments.append((rank_env, {**rank_env.env, "CUDA_VISIBLE_DEVICES": gpus} if use_gpu else rank_env.env))
    return environments
