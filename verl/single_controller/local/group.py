"""Workers on this host, without Ray: a single worker is an object in this process, several are processes."""

import weakref
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from verl.processes.limits import Limits
from verl.single_controller.dispatch import Call
from verl.single_controller.worker import RankEnv, Worker, WorkerSpec, free_port
from verl.single_controller.worker_group import CALL_TIMEOUT, Future, WorkerGroup

if TYPE_CHECKING:
    from verl.single_controller.local.process_pool import ProcessPool


class InProcessPool:
    """Workers that are objects of this process, one per role, as rank 0 of 1.

    A call has finished when its Future is returned. An exception is raised unchanged, with its own traceback and a note
    with role and method.
    """

    def __init__(self, specs: Mapping[str, WorkerSpec]):
        rank_env = RankEnv(master_port=free_port())
        self.roles = set(specs)
        self.workers: dict[str, Worker] = {role: spec.build(rank_env) for role, spec in specs.items()}

    def call(self, role: str, method: str, calls: list[Call | None]) -> Future[list]:
        """Run `method` of `role`."""
        (call,) = calls
        try:
            return Future.completed([call.finish(getattr(self.workers[role], method)(*call.args, **call.kwargs))])
        except Exception as error:
            error.add_note(f"in {role}.{method}(), rank 0 of 1, in this process")
            raise

    def release(self, role: str) -> None:
        """Drop the worker of a role."""
        self.roles.discard(role)
        self.workers.pop(role, None)


class LocalWorkerGroup(WorkerGroup):
    """A Worker class over `n_workers` ranks of this host.

        with LocalWorkerGroup(WorkerSpec(MyWorker, {"scale": 2.0}), n_workers=4) as group:
            out = group.multiply(batch)

    A single worker is an object of this process, and a call on the group is a call of its method. Several workers, or
    workers with `devices`, run in processes; see `process_pool` for how errors, crashes and hangs are reported.

    Args:
        name: Role shown in errors; the name of the class by default.
        pool: Existing processes that host this role already (see `colocate`).
        **options: Otherwise those of `make_pool`.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        n_workers: int = 1,
        name: str | None = None,
        *,
        pool: "InProcessPool | ProcessPool | None" = None,
        **options: Any,
    ):
        super().__init__(spec.worker_class, n_workers, name)
        self._pool = pool or make_pool({self.name: spec}, n_workers, **options)
        # Release the role when the group is garbage-collected; `discard` is safe in any thread.
        self._finalizer = weakref.finalize(self, self._pool.roles.discard, self.name)
        self._finalizer.atexit = False

    @property
    def worker(self) -> Worker:
        """The worker, if it is an object of this process. Raises ValueError otherwise."""
        if not isinstance(self._pool, InProcessPool):
            raise ValueError(f"the {self.world_size} workers of {self.name!r} run in other processes")
        return self._pool.workers[self.name]

    @property
    def processes(self) -> Hashable | None:
        return None if isinstance(self._pool, InProcessPool) else self._pool


def make_pool(
    specs: Mapping[str, WorkerSpec],
    n_workers: int = 1,
    *,
    timeout: float | Limits = CALL_TIMEOUT,
    devices: Sequence[int] | None = None,
    env: Mapping[str, str] | None = None,
    separate_process: bool = False,
) -> "InProcessPool | ProcessPool":
    """Start the workers of one or more roles, in this process or in others.

    Args:
        timeout: Seconds that a call may take in other processes; or limits by measured durations.
        devices: Indices of the visible GPUs; rank i uses the i-th of them.
        env: Additional variables of the processes.
        separate_process: Start a process even for a single worker.
    """
    if n_workers < 1:
        raise ValueError(f"n_workers: expected at least 1, found {n_workers}")
    if devices is not None and len(devices) != n_workers:
        raise ValueError(f"devices: expected one for each of the {n_workers} workers, found {list(devices)}")
    if n_workers == 1 and devices is None and not env and not separate_process:
        return InProcessPool(specs)
    from verl.single_controller.local.process_pool import ProcessPool

    return ProcessPool(specs, n_workers, timeout=timeout, devices=devices, env=env)


def colocate(specs: Mapping[str, WorkerSpec], n_workers: int = 1, **options: Any) -> dict[str, LocalWorkerGroup]:
    """Run several roles in the same process(es), with the arguments of `make_pool`. Their calls run one after another,
    in call order."""
    pool = make_pool(specs, n_workers, **options)
    return {role: LocalWorkerGroup(spec, n_workers, role, pool=pool) for role, spec in specs.items()}
