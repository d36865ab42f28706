"""Clusters of one host, without Ray: this process, or processes of this host."""

import os
import socket
import time
import weakref
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from verl.config import schema
from verl.processes.limits import Limits
from verl.single_controller.cluster import Pools, ResourcePool, RunConfig, start_pools, wait_limits
from verl.single_controller.dispatch import Call
from verl.single_controller.remote_batch import fetch_columns
from verl.single_controller.worker import RankEnv, Worker, WorkerSpec, free_port
from verl.single_controller.worker_group import CALL_TIMEOUT, Future, WorkerGroup, record_span
from verl.utils.device import resolve_device

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
        # of ranks in other processes: a worker gets ordinary tensors
        kwargs = {name: fetch_columns(value) for name, value in call.kwargs.items()}
        call = replace(call, args=tuple(map(fetch_columns, call.args)), kwargs=kwargs)
        start = time.time()
        try:
            result = call.run(self.workers, role, method)
            record_span(socket.gethostname(), os.getpid(), 0, role, method, start, time.time())
            return Future.completed([result])
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


def local_cluster(config: RunConfig) -> "InProcessCluster | ProcessCluster":
    """This process for a run of one process without a separate environment; otherwise processes of this host."""
    trainer = config.trainer
    if trainer.n_gpus_per_node == 1 and not trainer.worker_env:
        return InProcessCluster()
    return ProcessCluster(device=trainer.device, timeout=wait_limits(config), env=trainer.worker_env)


class InProcessCluster:
    """All roles in this process: for laptops, notebooks and debuggers, where a breakpoint works."""

    def __init__(self) -> None:
        self._groups: dict[str, WorkerGroup] = {}

    def check(self, config: RunConfig) -> None:
        _check_one_host(config)
        if isinstance(config, schema.Config) and config.placement.local_roles:
            raise ValueError(
                f"placement.local_roles is {config.placement.local_roles}, but all roles run in this process: remove "
                "it, or set trainer.backend=ray or trainer.n_gpus_per_node=2 or more for the other roles"
            )
        if config.trainer.n_gpus_per_node > 1:
            raise ValueError(
                f"trainer.n_gpus_per_node is {config.trainer.n_gpus_per_node}, but InProcessCluster has one process: "
                "set trainer.n_gpus_per_node=1, or use ProcessCluster"
            )
        resolve_device(config.trainer.device)

    def start(self, pools: Pools, specs: Mapping[str, WorkerSpec]) -> dict[str, WorkerGroup]:
        if len(pools) != 1:
            raise ValueError(f"InProcessCluster has one pool, found {', '.join(pools)}: use ProcessCluster")
        self._groups = start_pools(pools, specs, lambda roles, _: colocate(roles))
        return self._groups

    def sizes_left(self, nnodes: int, per_node: int) -> list[tuple[int, int]]:
        return [(nnodes, per_node)]

    def shutdown(self) -> None:
        for group in self._groups.values():
            group.shutdown()


class ProcessCluster:
    """One process per rank on this host; the roles of a pool share its processes.

    Unless OMP_NUM_THREADS is set, the processes of all pools share the CPU cores. With more threads than cores, every
    parallel region of one process waits until the scheduler has run all of its threads: milliseconds instead of
    microseconds, as soon as another process works at the same time.

    Args:
        device: "auto", "cpu" or "cuda"; on "cuda" rank i of a pool sees the i-th device of the pool.
        timeout: limits of waits; of a number, seconds that one call may take before a hang is reported.
        env: further environment variables of the processes.
    """

    def __init__(
        self, device: str = "auto", timeout: float | Limits = CALL_TIMEOUT, env: Mapping[str, str] | None = None
    ) -> None:
        self.device = device
        self.timeout = timeout
        self.env = dict(env or {})
        self._groups: dict[str, WorkerGroup] = {}
        self._threads_before: int | None = None  # of this process

    def check(self, config: RunConfig) -> None:
        _check_one_host(config)
        # the device of the last process: fewer GPUs than processes are reported now
        resolve_device(self.device, config.trainer.n_gpus_per_node - 1)

    def start(self, pools: Pools, specs: Mapping[str, WorkerSpec]) -> dict[str, WorkerGroup]:
        on_gpu = resolve_device(self.device).type == "cuda"
        env = self._share_cores(sum(placed[0][1].world_size for placed in pools.values()), on_gpu) | self.env

        def start(roles: dict[str, WorkerSpec], pool: ResourcePool) -> dict[str, WorkerGroup]:
            devices = None
            if on_gpu:
                devices = pool.devices if pool.devices is not None else range(pool.world_size)
            options = {"timeout": self.timeout, "devices": devices, "env": env, "separate_process": True}
            return colocate(roles, pool.world_size, **options)

        try:
            self._groups = start_pools(pools, specs, start, self.env)
        except BaseException:
            self.shutdown()
            raise
        return self._groups

    def sizes_left(self, nnodes: int, per_node: int) -> list[tuple[int, int]]:
        on_gpu = resolve_device(self.device).type == "cuda"
        left = min(per_node, torch.cuda.device_count()) if on_gpu else per_node
        return [(nnodes, count) for count in range(left, 0, -1)]

    def _share_cores(self, ranks: int, on_gpu: bool) -> dict[str, str]:
        """Limit the CPU threads of this process. Returns the environment that limits those of the workers."""
        if "OMP_NUM_THREADS" in os.environ | self.env:
            return {}
        self._threads_before = torch.get_num_threads()
        # on a CPU the workers compute most of the time; with GPUs, this process needs its cores at the same time
        threads = max(1, self._threads_before // (ranks + on_gpu))
        torch.set_num_threads(threads)
        return {"OMP_NUM_THREADS": str(threads)}

    def shutdown(self) -> None:
        for group in self._groups.values():
            group.shutdown()
        if self._threads_before is not None:
            torch.set_num_threads(self._threads_before)
            self._threads_before = None


def _check_one_host(config: RunConfig) -> None:
    """Several hosts need Ray, and a run that asks for Ray must not start without it."""
    trainer = config.trainer
    if trainer.backend != "local":
        raise ValueError(
            f"trainer.backend is {trainer.backend}, but this trainer does not use it: set trainer.backend=local "
            "(RayPPOTrainer, and PPOTrainer without a cluster, do use it)"
        )
    if trainer.nnodes > 1:
        raise ValueError(
            f"trainer.nnodes is {trainer.nnodes}, but trainer.backend=local runs on one host: set trainer.nnodes=1, or "
            "trainer.backend=ray (docs/multinode.md)"
        )
