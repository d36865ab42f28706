"""RayWorkerGroup: workers as Ray actors in a placement group. Only this file and `ray_placement` know Ray here.

`RankActor` is one rank, in its own process somewhere in the cluster. `RayPool` is the controller's side of all ranks of
a resource pool: what happens to their processes is said in the words of `process_pool`. Batches travel by reference
(`data_plane`): rows go from the rank that made them to the ranks that need them, and large columns reach the controller
only when an operator reads them.
"""

import faulthandler
import functools
import math
import os
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
import torch
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from verl.single_controller.data_plane import Packed, PackedCall, Shelf, Take, load_call, nbytes, unpack, unpack_result
from verl.single_controller.dispatch import Call
from verl.single_controller.placement import ResourcePool
from verl.single_controller.ray.placement import START_TIMEOUT, reserve
from verl.single_controller.remote_tensor import Source
from verl.single_controller.worker import Place, Worker, WorkerSpec, free_port
from verl.single_controller.worker_group import (
    CALL_TIMEOUT,
    Future,
    Trouble,
    WorkerDied,
    WorkerError,
    WorkerGroup,
    WorkerTimeout,
    first_error,
)
from verl.utils.log import setup_worker_logging

_SETTLE = 0.25  # seconds in which further failures are still awaited, to tell the first one from those it caused
_GRACE = 5.0  # seconds that an actor has to end by itself, or to tell where it stands
_INLINE_BYTES = 1 << 16  # larger calls are put into the object store once, for all ranks that get them


# ---- one rank ----


@dataclass(frozen=True)
class _Own:
    """In the place of rows that were sent: rows that the called rank has on its own shelf."""

    key: int
    names: list[str]
    rows: torch.Tensor


class RankActor:
    """One rank: its workers, one per role, and the columns that they made.

    Ray runs three kinds of its methods at the same time, each in one thread of its own: calls of workers, serving rows
    ("data"), and looking at what the first is doing ("control").
    """

    def __init__(self) -> None:
        self._workers: dict[str, Worker] = {}
        self._shelf = Shelf()
        self._rank = 0
        self._running_since: float | None = None

    def where(self) -> tuple[str, str, str, list, int]:
        """Actor id, node id, address of the node, the GPUs that Ray gave to this rank, and a free port."""
        here = ray.get_runtime_context()
        return here.get_actor_id(), here.get_node_id(), ray.util.get_node_ip_address(), ray.get_gpu_ids(), free_port()

    def start(self, specs: Mapping[str, WorkerSpec], place: Place, env: dict[str, str], folder: str) -> tuple:
        """Make the workers. folder: the controller's, which relative paths of a run start from; used where this node
        sees it and no working directory was sent. Returns (True, None, time) or (False, error, time)."""
        os.environ.update(env)
        if "working_dir" not in ray.get_runtime_context().runtime_env and os.path.isdir(folder):
            os.chdir(folder)
        self._rank = place.rank
        setup_worker_logging(place.rank)
        role = ""
        try:
            for role, spec in specs.items():
                self._workers[role] = spec.build(place)
        except BaseException as error:
            return False, WorkerError.of(error, role, "__init__", place.rank), time.time()
        return True, None, time.time()

    def run(self, role: str, method: str, packed: Packed, padding: int, collect: bool, *rows: Packed | _Own) -> tuple:
        """One call. rows: for each Take of the call its rows. Returns (True, packed result, time) or (False, error,
        time)."""
        self._running_since = time.monotonic()
        try:
            taken = [self._shelf.take(r.key, r.names, r.rows) if isinstance(r, _Own) else unpack(r) for r in rows]
            args, kwargs = load_call(packed, taken)
            result = getattr(self._workers[role], method)(*args, **kwargs)
            finished = Call(args, kwargs, padding, collect).finish(result)
            return True, self._shelf.pack_result(finished), time.time()
        except BaseException as error:  # SystemExit included: a worker that wants to end must be heard of
            return False, WorkerError.of(error, role, method, self._rank), time.time()
        finally:
            self._running_since = None

    def pack_rows(self, key: int, names: list[str], rows: torch.Tensor) -> Packed:
        return self._shelf.pack_rows(key, names, rows)

    def drop(self, keys: list[int]) -> None:
        self._shelf.drop(keys)

    def look(self) -> tuple[float | None, str]:
        """Seconds since the present call began (None: there is none), and the stacks of all threads."""
        since = self._running_since
        with tempfile.TemporaryFile() as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            return since and time.monotonic() - since, file.read().decode(errors="replace")


# ---- the controller's side ----


@dataclass
class _Rank:
    """One rank as the controller sees it. dropped: keys of batches on its shelf that nobody refers to any more."""

    rank: int
    actor: Any
    actor_id: str = ""
    node: str = ""
    host: str = ""
    dropped: deque[int] = field(default_factory=deque)

    def rows(self, key: int, names: list[str], rows: torch.Tensor) -> ray.ObjectRef:
        """Rows of this rank's shelf, as they are sent."""
        return self.actor.pack_rows.options(concurrency_group="data").remote(key, names, rows)


class _ShelfSource(Source):
    """One batch on the shelf of a rank, for as long as a column of the controller refers to it."""

    def __init__(self, rank: _Rank, key: int):
        self.rank, self.key = rank, key
        # only noted here: this runs wherever Python happens to notice, which is no place to call Ray from
        weakref.finalize(self, rank.dropped.append, key).atexit = False

    def fetch(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        try:
            return unpack(ray.get(self.rank.rows(self.key, [name], rows)))[name]
        except RayActorError as error:
            message = f"column {name!r} is lost with the process that held it"
            raise WorkerDied(message, "", "", self.rank.rank, self.rank.host, str(error)) from None


class _Outgoing:
    """Arguments that one or several ranks get: packed, stored and fetched once."""

    def __init__(self, call: Call):
        packed = PackedCall((call.args, call.kwargs))
        self._takes = packed.takes
        self._content = ray.put(packed.packed) if nbytes(packed.packed) > _INLINE_BYTES else packed.packed
        self._sent: dict[int, ray.ObjectRef] = {}

    def gather(self, to: _Rank) -> list[ray.ObjectRef | _Own]:
        """The rows that a rank needs: its own stay where they are, the others are on their way from now on."""
        return [self._rows(to, number, take) for number, take in enumerate(self._takes)]

    def _rows(self, to: _Rank, number: int, take: Take) -> ray.ObjectRef | _Own:
        source: _ShelfSource = take.source
        if source.rank is to:
            return _Own(source.key, take.names, take.rows)
        if number not in self._sent:
            self._sent[number] = source.rank.rows(source.key, take.names, take.rows)
        return self._sent[number]

    def run(self, on: _Rank, role: str, method: str, call: Call, rows: list) -> ray.ObjectRef:
        return on.actor.run.remote(role, method, self._content, call.padding, call.collect, *rows)


@dataclass
class _Pending:
    """A call under way. `calls` keeps the columns alive that the ranks still have to read."""

    role: str
    method: str
    refs: dict[ray.ObjectRef, int]
    calls: list[Call | None]
    deadline: float
    answers: dict[int, Any] = field(default_factory=dict)

    def is_over(self) -> bool:
        refs = list(self.refs)  # the thread that waits for the call takes them out one by one
        return not refs or not ray.wait(refs, num_returns=len(refs), timeout=0)[1]


class RayPool:
    """The processes of a resource pool: one actor for each, with one worker per role of `specs`.

    The ranks of a node are consecutive. LOCAL_RANK counts on each node, and with `use_gpu` the ranks of a node see the
    same GPUs, those that Ray gave to them: rank LOCAL_RANK uses GPU LOCAL_RANK, as with torchrun.

    timeout: seconds that one call (or the making of the workers) may take. start_timeout: seconds that the cluster may
    take to give the processes. env: further variables of their environment. placement: what `reserve` gave for
    `resources`, None to reserve it here. Raises ValueError when the cluster does not give the processes, and
    WorkerError when a worker cannot be made.
    """

    def __init__(
        self,
        specs: Mapping[str, WorkerSpec],
        resources: ResourcePool,
        *,
        use_gpu: bool = False,
        timeout: float = CALL_TIMEOUT,
        start_timeout: float = START_TIMEOUT,
        env: Mapping[str, str] | None = None,
        placement: PlacementGroup | None = None,
    ):
        self.roles = set(specs)
        self.timeout = timeout
        self._lock = threading.Lock()
        self._over: WorkerError | None = None
        self._under_way: list[_Pending] = []
        if placement is None:
            placement = reserve([resources], use_gpu=use_gpu, timeout=start_timeout)[resources]
        self._placement: PlacementGroup | None = placement
        self._ranks = _make_actors(resources, self._placement, use_gpu, env or {})
        try:
            places = _meet(self._ranks, use_gpu, start_timeout)
            refs = {
                r.actor.start.remote(dict(specs), place, env, os.getcwd()): r.rank
                for r, (place, env) in zip(self._ranks, places)
            }
            self._wait(_Pending("+".join(specs), "__init__", refs, [], time.monotonic() + timeout), None)
        except BaseException:
            self.stop()
            raise

    # ---- calls ----------------------------------------------------------------------------------------------------

    def call(self, role: str, method: str, calls: list[Call | None]) -> Future[list]:
        """Run `method` of `role` on every rank that has a Call; results in rank order."""
        if self._over is not None:
            reason = f"not called, since its processes were stopped: {str(self._over).splitlines()[0]}"
            raise WorkerError(reason, role, method, self._over.rank) from self._over
        if role not in self.roles:
            raise WorkerError("not called, since the group was shut down", role, method, 0)
        packed: dict[tuple[int, int], _Outgoing] = {}
        for call in calls:
            if call is not None and (id(call.args), id(call.kwargs)) not in packed:
                packed[id(call.args), id(call.kwargs)] = _Outgoing(call)
        chosen = [(self._ranks[rank], call) for rank, call in enumerate(calls) if call is not None]
        outgoing = [packed[id(call.args), id(call.kwargs)] for _, call in chosen]
        with self._lock:  # every rank gets the calls of all threads in the same order, or their collectives would cross
            self._forget()
            # first all rows, then all calls: a rank never waits for rows behind a call that waits for its own
            rows = [out.gather(rank) for out, (rank, _) in zip(outgoing, chosen)]
            refs = {
                out.run(rank, role, method, call, r): rank.rank for out, (rank, call), r in zip(outgoing, chosen, rows)
            }
            pending = _Pending(role, method, refs, calls, time.monotonic() + self.timeout)
            self._under_way.append(pending)
        return Future(lambda timeout: self._results(pending, timeout))

    def _forget(self) -> None:
        """Let go of calls that are over, and of the batches that nobody refers to any more."""
        self._under_way = [p for p in self._under_way if not p.is_over()]
        for rank in self._ranks:
            keys = [rank.dropped.popleft() for _ in range(len(rank.dropped))]
            if keys:
                rank.actor.drop.options(concurrency_group="data").remote(keys)

    def _results(self, pending: _Pending, timeout: float | None) -> list:
        n = len(pending.calls)
        self._wait(pending, timeout)
        return [self._unpacked(rank, pending.answers[rank]) if rank in pending.answers else None for rank in range(n)]

    def _unpacked(self, rank: int, packed: Packed) -> Any:
        return unpack_result(packed, functools.cache(lambda key: _ShelfSource(self._ranks[rank], key)))

    def _wait(self, pending: _Pending, timeout: float | None) -> None:
        until = math.inf if timeout is None else time.monotonic() + timeout
        while pending.refs:
            left = min(until, pending.deadline) - time.monotonic()
            ready, _ = ray.wait(list(pending.refs), timeout=max(left, 0))
            trouble = None
            if ready:
                trouble = self._answer(pending, ready[0])
            elif time.monotonic() >= until:
                raise TimeoutError(f"{pending.role}.{pending.method}() has not finished after {timeout} s")
            else:
                trouble = self._look(pending)
            if trouble is not None:
                raise self._give_up(pending, trouble)

    def _answer(self, pending: _Pending, ref: ray.ObjectRef) -> Trouble | None:
        """Take in one answer; the trouble that it tells of."""
        rank = pending.refs.pop(ref)
        try:
            good, content, when = ray.get(ref)
        except RayActorError as error:
            return 0, time.time(), self._death(pending, rank, error)
        except RayError as error:
            return 1, time.time(), WorkerError.of(error, pending.role, pending.method, rank)
        if not good:
            return 1, when, content
        pending.answers[rank] = content
        return None

    def _death(self, pending: _Pending, rank: int, error: RayActorError) -> WorkerDied:
        """Which process died: that of the rank that was called, or of one whose rows it waited for."""
        dead = next((r for r in self._ranks if r.actor_id == error.actor_id), None)
        if dead is None:
            message = "a process of another pool, which had rows for this call, died"
            return WorkerDied(message, pending.role, pending.method, rank, self._ranks[rank].host, str(error))
        lost = any(n["NodeID"] == dead.node and not n["Alive"] for n in ray.nodes())
        message = f"its node {dead.host} is lost" if lost else "its process died"
        return WorkerDied(message, pending.role, pending.method, dead.rank, dead.host, str(error))

    def _look(self, pending: _Pending) -> Trouble | None:
        """The deadline has passed: a hang, unless the ranks were still at earlier calls for a part of the time."""
        looks = [r.actor.look.options(concurrency_group="control").remote() for r in self._ranks]
        ray.wait(looks, num_returns=len(looks), timeout=_GRACE)
        running, stacks = [], []
        for rank, look in zip(self._ranks, looks):
            try:
                seconds, stack = ray.get(look, timeout=0)
            except (GetTimeoutError, RayError):
                seconds, stack = math.inf, "(no stacks: the process did not answer)"
            stacks.append(f"--- rank {rank.rank}\n{stack.strip()}")
            if rank.rank in pending.refs.values() and seconds is not None:
                running.append(seconds)
        if running and max(running) < self.timeout:
            pending.deadline = time.monotonic() + self.timeout - max(running)
            return None
        silent = sorted(pending.refs.values())
        answered = sorted(pending.answers) or "none"
        message = f"no answer after {self.timeout:g} s from ranks {silent} (answered: {answered}); stacks of all ranks:"
        host = self._ranks[silent[0]].host
        return (
            2,
            time.time(),
            WorkerTimeout(message, pending.role, pending.method, silent[0], host, "\n\n".join(stacks)),
        )

    def _give_up(self, pending: _Pending, trouble: Trouble) -> WorkerError:
        """Wait a moment for what else there is to hear, stop all processes, and give the first error."""
        troubles, until = [trouble], time.monotonic() + _SETTLE
        while self._over is None and pending.refs and time.monotonic() < until:
            ready, _ = ray.wait(list(pending.refs), timeout=max(until - time.monotonic(), 0))
            troubles += [t for t in (self._answer(pending, ref) for ref in ready) if t is not None]
        with self._lock:
            if self._over is None:
                self._over = first_error(troubles)
                self._kill()
            return self._over

    # ---- the end --------------------------------------------------------------------------------------------------

    def release(self, role: str) -> None:
        """One role less; the processes end with the last one."""
        self.roles.discard(role)
        if not self.roles:
            self.stop()

    def stop(self) -> None:
        """End the actors: kindly when they are idle, at once when a call is under way. Gives the resources back."""
        self.roles.clear()
        if not ray.is_initialized() or self._placement is None:
            return
        if self._over is None and all(p.is_over() for p in self._under_way):
            ray.wait(
                [r.actor.__ray_terminate__.remote() for r in self._ranks], num_returns=len(self._ranks), timeout=_GRACE
            )
        self._kill()
        remove_placement_group(self._placement)
        self._placement = None

    def _kill(self) -> None:
        for rank in self._ranks:
            ray.kill(rank.actor)


def _make_actors(
    resources: ResourcePool, group: PlacementGroup, use_gpu: bool, further: Mapping[str, str]
) -> list[_Rank]:
    """The actors in rank order, node by node."""
    actor_class = ray.remote(concurrency_groups={"data": 1, "control": 1})(RankActor)
    # without this Ray shows each process one GPU only, and LOCAL_RANK would not be its number
    env = {**further, **({"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"} if use_gpu else {})}
    ranks = []
    for node, count in enumerate(resources.processes_per_node):
        for _ in range(count):
            actor = actor_class.options(
                num_cpus=1,
                num_gpus=int(use_gpu),
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=node),
                runtime_env={"env_vars": env} if env else None,
            ).remote()
            ranks.append(_Rank(len(ranks), actor))
    return ranks


def _meet(ranks: list[_Rank], use_gpu: bool, timeout: float) -> list[tuple[Place, dict[str, str]]]:
    """The place and the environment of each rank, from where Ray has put them."""
    try:
        found = ray.get([r.actor.where.remote() for r in ranks], timeout=timeout)
    except GetTimeoutError:
        message = f"Ray has not started all {len(ranks)} processes after {timeout:g} s; its logs say why"
        raise WorkerTimeout(message, "", "__init__", 0) from None
    _, _, master_addr, _, port = found[0]
    nodes = [node for _, node, *_ in found]
    places = []
    for rank, (actor_id, node, host, _, _) in zip(ranks, found):
        rank.actor_id, rank.node, rank.host = actor_id, node, host
        local_rank = nodes[: rank.rank].count(node)
        place = Place(rank.rank, len(ranks), local_rank, nodes.count(node), master_addr, port)
        gpus = [str(gpu) for _, other, _, given, _ in found if other == node for gpu in given]
        places.append((place, {**place.env, "CUDA_VISIBLE_DEVICES": ",".join(gpus)} if use_gpu else place.env))
    return places


class RayWorkerGroup(WorkerGroup):
    """A Worker class over the ranks of a resource pool, as Ray actors. `ray.init()` comes before it.

    name: the role, as errors call it. pool: processes made before, which have this role already (`colocate`); then it
    alone decides about GPUs and timeouts. The others are those of RayPool. End it with `shutdown` (or `with`): the
    actors hold their GPUs until then.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        resources: ResourcePool,
        name: str | None = None,
        *,
        use_gpu: bool = False,
        timeout: float = CALL_TIMEOUT,
        start_timeout: float = START_TIMEOUT,
        pool: RayPool | None = None,
    ):
        super().__init__(spec.worker_class, resources.world_size, name)
        self._pool = pool or RayPool(
            {self.name: spec}, resources, use_gpu=use_gpu, timeout=timeout, start_timeout=start_timeout
        )

    @property
    def processes(self) -> Hashable:
        return self._pool

    def execute(self, method: str, calls: list[Call | None]) -> Future[list]:
        return self._pool.call(self.name, method, calls)

    def shutdown(self) -> None:
        """End the role. The actors end with the last role that lives in them."""
        self._pool.release(self.name)


def colocate(specs: Mapping[str, WorkerSpec], resources: ResourcePool, **how: Any) -> dict[str, RayWorkerGroup]:
    """Several roles in the actors of one resource pool: one group per role. Their calls run one after another.

    how: use_gpu, timeout, start_timeout, env and placement, as in RayPool.
    """
    pool = RayPool(specs, resources, **how)
    return {role: RayWorkerGroup(spec, resources, role, pool=pool) for role, spec in specs.items()}
