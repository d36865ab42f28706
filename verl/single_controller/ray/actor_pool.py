"""RayPool: the actors of a resource pool, as the controller sees them.

Errors, crashes and hangs are reported as by `local.process_pool`. Batches are passed by reference (`remote_batch`):
large columns are in Ray's object store, from which the ranks that need them read, and the controller only if an
operator reads them. Ray frees them with the last reference.
"""

import contextlib
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
import torch
from psutil import STATUS_DEAD, STATUS_ZOMBIE
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from verl.dataflow.operator import running_operator
from verl.processes.child import process_status
from verl.processes.limits import Durations, Limits
from verl.single_controller.cluster import ResourcePool
from verl.single_controller.dispatch import Call
from verl.single_controller.ray.rank_actor import ActorInfo, RankActor
from verl.single_controller.remote_batch import Packed, PackedCall, Source, nbytes, unpack_result
from verl.single_controller.worker import RankEnv, WorkerSpec
from verl.single_controller.worker_group import (
    CALL_TIMEOUT,
    CallWatch,
    Failure,
    Future,
    NodeLost,
    RankState,
    WorkerDied,
    WorkerError,
    WorkerTimeout,
    first_error,
    record_span,
    timeout_error,
)
from verl.utils.redaction import secrets_of_settings

logger = logging.getLogger("verl.single_controller")

START_TIMEOUT = 300.0  # default limit for the cluster to provide the resources of a run, seconds
_QUIET_SECONDS = 2.0  # before the first log line: a cluster that has the resources needs a moment
_RESERVE_SECONDS = 0.5  # one wait for a placement group; Ray does not handle Ctrl-C during it
_SETTLE_SECONDS = 0.25  # after a failure, to collect others: the first one is the cause
_SHUTDOWN_SECONDS = 5.0  # for an actor to end by itself, or to report its progress
_STATUS_SECONDS = 15.0  # for a node to start a process that reads the state of another
_WAIT_SECONDS = 1.0  # one wait for replies
_CONNECT_SECONDS = 5.0  # for a node to accept a connection
#: how long a call survives a cut of the link; Ray's own limit for the process that replies is 20 s
CONNECTION_LIMIT = {"RAY_grpc_keepalive_timeout_ms": "60000"}
_MAX_INLINE_BYTES = 1 << 16  # larger arguments are put into the object store once for all ranks


@dataclass
class _Rank:
    """The actor of one rank.

    Attributes:
        actor: Ray's handle.
        info: Where it runs; set by `_rank_environments`.
    """

    rank: int
    actor: Any
    info: ActorInfo | None = None


class _RemoteSource(Source):
    """The `Columns` of a result in the object store. `rank` has produced them, and owns them."""

    def __init__(self, rank: _Rank, ref: ray.ObjectRef):
        self.rank, self.ref = rank, ref

    def fetch(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        try:
            return ray.get(self.ref).fetch(name, rows)
        except RayError as error:
            message = f"column {name!r} was lost with the process that held it"
            raise WorkerDied(message, "", "", self.rank.rank, self.rank.info.host, str(error)) from None


def _packed(call: Call) -> tuple[Packed | ray.ObjectRef, list[ray.ObjectRef]]:
    """The arguments of one or more ranks, large ones in the object store, and the columns that they refer to."""
    packed = PackedCall((call.args, call.kwargs))
    content = ray.put(packed.packed) if nbytes(packed.packed) > _MAX_INLINE_BYTES else packed.packed
    return content, [source.ref for source in packed.sources]


@dataclass
class _PendingCall:
    """A call that has not finished."""

    role: str
    method: str
    refs: dict[ray.ObjectRef, int]
    watch: CallWatch
    replies: dict[int, Any] = field(default_factory=dict)

    def is_done(self) -> bool:
        refs = list(self.refs)  # a copy: the thread that waits for the call removes them one by one
        return not refs or not ray.wait(refs, num_returns=len(refs), timeout=0)[1]


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
        try:
            environments = _rank_environments(self._ranks, use_gpu, start_timeout)
            refs = {
                r.actor.start.remote(dict(specs), rank_env, env, os.getcwd()): r.rank
                for r, (rank_env, env) in zip(self._ranks, environments)
            }
            self._wait(self._pending_call("+".join(specs), "__init__", refs), None)
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
        packed: dict[tuple[int, int], tuple[Any, list[ray.ObjectRef]]] = {}
        for call in calls:
            if call is not None and (id(call.args), id(call.kwargs)) not in packed:
                packed[id(call.args), id(call.kwargs)] = _packed(call)
        with self._lock:  # all ranks must get the calls of all threads in the same order, or their collectives mismatch
            refs = {}
            for rank, call in enumerate(calls):
                if call is not None:
                    content, columns = packed[id(call.args), id(call.kwargs)]
                    run = self._ranks[rank].actor.run
                    refs[run.remote(role, method, content, call.padding, call.collect, *columns)] = rank
            pending = self._pending_call(role, method, refs)
            self._pending = [*(p for p in self._pending if not p.is_done()), pending]

        def results(timeout: float | None) -> list:
            self._wait(pending, timeout)
            unpacked: list[Any] = [None] * len(calls)
            for rank, (result, columns) in pending.replies.items():
                unpacked[rank] = unpack_result(result, columns and _RemoteSource(self._ranks[rank], columns))
            pending.replies.clear()  # only the columns of the batch keep the objects
            return unpacked

        return Future(results)

    def _pending_call(self, role: str, method: str, refs: dict[ray.ObjectRef, int]) -> _PendingCall:
        watch = CallWatch(self.durations, role, method, running_operator())
        watch.elapsed.tick(time.monotonic())
        return _PendingCall(role, method, refs, watch)

    # ---- replies and failures -------------------------------------------------------------------------------------

    def _wait(self, pending: _PendingCall, timeout: float | None) -> None:
        """Receive the replies of all ranks. TimeoutError: after `timeout` seconds; the call can be waited for again.
        WorkerError: a rank failed or died, or the call exceeded its limit; all processes are killed."""
        until = math.inf if timeout is None else time.monotonic() + timeout
        while pending.refs:
            now, watch = time.monotonic(), pending.watch
            wait = min(until - now, watch.limit.seconds - watch.elapsed.seconds, _WAIT_SECONDS)
            ready, _ = ray.wait(list(pending.refs), timeout=max(wait, 0))
            is_late = watch.elapsed.tick(time.monotonic()) >= watch.limit.seconds
            if ready:
                failure = self._read_reply(pending, ready[0])
            elif time.monotonic() >= until:
                raise TimeoutError(f"{pending.role}.{pending.method}() has not finished after {timeout} s")
            else:
                failure = self._check_limit(pending) if is_late else None
            if failure is not None:
                raise self._stop_after(pending, failure)

    def _state(self, rank: _Rank, busy: bool, responds: bool) -> RankState:
        info = rank.info
        status = "running" if responds else _status(info.node_id, info.pid)
        return RankState(rank.rank, info.pid, info.host_name, status, busy)

    def _read_reply(self, pending: _PendingCall, ref: ray.ObjectRef) -> Failure | None:
        """Read one reply; the failure that it reports, if any."""
        rank = pending.refs.pop(ref)
        try:
            succeeded, content, ended, seconds = ray.get(ref)
        except RayActorError as error:
            return 0, time.time(), self._died(pending, rank, error)
        except RayError as error:
            return 1, time.time(), WorkerError.from_exception(error, pending.role, pending.method, rank)
        if not succeeded:
            return 1, ended, content
        info = self._ranks[rank].info
        record_span(info.host_name, info.pid, rank, pending.role, pending.method, ended - seconds, ended)
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
            socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), _CONNECT_SECONDS).close()
        except ConnectionRefusedError:
            return f"{lost}: the host responds, but Ray (the raylet) no longer runs on it"
        except OSError as error:
            return f"network fault: {local} cannot reach {info.host} ({error}): the link is cut, or the host is down"
        if not node["Alive"]:
            return lost
        if is_unavailable and _status(info.node_id, info.pid) not in (None, STATUS_DEAD, STATUS_ZOMBIE):
            return f"network fault: the connection from {local} to {info.host} broke; its process still runs"
        return None

    def _check_limit(self, pending: _PendingCall) -> Failure | None:
        """After the limit: a timeout, unless the ranks have been running earlier calls until now."""
        running = [seconds for rank, (seconds, _) in self._progress().items() if rank in pending.refs.values()]
        running = [seconds for seconds in running if seconds is not None]
        limit = pending.watch.limit.seconds
        if running and max(running) < limit:
            pending.watch.elapsed.seconds = max(running)
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
        elif any(self._state(rank, busy=True, responds=False).is_stopped for rank in silent):
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


def _status(node: str, pid: int) -> str | None:
    """The state of a process, as in psutil, which a process of its node reads; None without a response."""
    on_node = NodeAffinitySchedulingStrategy(node, soft=False)
    task = ray.remote(process_status).options(num_cpus=0, max_retries=0, scheduling_strategy=on_node)
    with contextlib.suppress(RayError):
        return ray.get(task.remote(pid), timeout=_STATUS_SECONDS)
    return None


def _create_actors(
    resources: ResourcePool, group: PlacementGroup, use_gpu: bool, env: Mapping[str, str]
) -> list[_Rank]:
    """The actors in rank order, node by node."""
    actor_class = ray.remote(concurrency_groups={"control": 1})(RankActor)
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
            ).remote(secrets_of_settings())
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


# ---- placement groups -----------------------------------------------------------------------------------------------


def reserve(
    pools: Iterable[ResourcePool], *, use_gpu: bool = False, timeout: float = START_TIMEOUT, advice: str = ""
) -> dict[ResourcePool, PlacementGroup]:
    """Create a placement group for each pool, with one bundle per node, all on different nodes.

    Args:
        use_gpu: Request one GPU per process in addition to one CPU.
        timeout: Limit for all of them, seconds.
        advice: Shown in the error if the cluster is too small.

    Raises:
        ValueError: Ray is not initialized, or the resources were not available in time. Nothing stays reserved.
    """
    if not ray.is_initialized():
        raise ValueError("Ray is not initialized in this process: call ray.init() before you create worker groups")
    deadline = time.monotonic() + timeout
    groups: dict[ResourcePool, PlacementGroup] = {}
    try:
        for pool in pools:
            bundles = [{"CPU": n, **({"GPU": n} if use_gpu else {})} for n in pool.processes_per_node]
            groups[pool] = placement_group(bundles, strategy="STRICT_SPREAD", name=f"verl-{pool.name}")
            _wait_for(groups[pool], _describe(bundles), pool.name, deadline, advice)
    except BaseException:
        for group in groups.values():
            remove_placement_group(group)
        raise
    return groups


def _wait_for(group: PlacementGroup, required: str, name: str, deadline: float, advice: str) -> None:
    """Wait for one placement group. Logs what is missing, once and whenever the cluster changes."""
    start, logged = time.monotonic(), ""
    while not group.wait(_RESERVE_SECONDS):
        available = _describe(_cpus_and_gpus(node["Resources"]) for node in ray.nodes() if node["Alive"])
        free = _format_counts(_cpus_and_gpus(ray.available_resources()))
        if time.monotonic() > deadline:
            raise ValueError(
                f"resource pool {name!r} requires {required}, which the cluster did not provide within "
                f"{time.monotonic() - start:.0f} s; it has {available}, of which {free} are free. "
                f"{advice or 'Start more nodes, or lower trainer.nnodes or trainer.n_gpus_per_node'}"
            )
        if available != logged and time.monotonic() > start + _QUIET_SECONDS:
            logged = available
            logger.warning("waiting for %s; the cluster has %s, of which %s are free", required, available, free)


def _cpus_and_gpus(resources: Mapping[str, float]) -> dict[str, float]:
    return {name: resources.get(name, 0.0) for name in ("CPU", "GPU") if name == "CPU" or name in resources}


def _format_counts(counts: Mapping[str, float]) -> str:
    return " and ".join(f"{count:g} {name}" for name, count in counts.items())


def _describe(nodes: Iterable[Mapping[str, float]]) -> str:
    """Count equal nodes: `2 nodes with 1 CPU and 1 GPU, 1 node with 4 CPU`."""
    descriptions = [_format_counts(node) for node in nodes]
    counts = [
        f"{descriptions.count(text)} node{'s' * (descriptions.count(text) > 1)} with {text}"
        for text in dict.fromkeys(descriptions)
    ]
    return ", ".join(counts) or "no nodes"
