"""Workers of this host, without Ray. One worker is an object of this process, several are processes."""

import weakref
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from verl.single_controller.dispatch import Call
from verl.single_controller.local.process_pool import ProcessPool
from verl.single_controller.worker import Place, Worker, WorkerSpec, free_port
from verl.single_controller.worker_group import CALL_TIMEOUT, Future, WorkerGroup


class ThisProcess:
    """The pool of one: workers that are objects of this process. A call has run when its Future is returned, and an
    error passes as it was raised, with its own stack and a note that names role and rank."""

    def __init__(self, specs: Mapping[str, WorkerSpec]):
        place = Place(master_port=free_port())
        self.roles = set(specs)
        self.workers: dict[str, Worker] = {role: spec.build(place) for role, spec in specs.items()}

    def call(self, role: str, method: str, calls: list[Call | None]) -> Future[list]:
        (call,) = calls
        try:
            return Future.of([call.finish(getattr(self.workers[role], method)(*call.args, **call.kwargs))])
        except Exception as error:
            error.add_note(f"in {role}.{method}(), rank 0 of 1, in this process")
            raise

    def release(self, role: str) -> None:
        self.roles.discard(role)
        self.workers.pop(role, None)


class LocalWorkerGroup(WorkerGroup):
    """A Worker class over `n_workers` ranks of this host.

    One worker lives in this process, and a call on the group is a call of its method. Several workers, or workers with
    `devices`, are processes of their own: see `process_pool` for what happens when one fails, dies or hangs.

    name: the role, as errors call it. timeout: seconds that one call may take in other processes. devices: the GPU
    numbers that these see (rank i uses the i-th). pool: processes made before, which have this role already
    (`colocate`); then it alone decides about number, timeout and devices.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        n_workers: int = 1,
        name: str | None = None,
        *,
        timeout: float = CALL_TIMEOUT,
        devices: Sequence[int] | None = None,
        pool: ThisProcess | ProcessPool | None = None,
    ):
        super().__init__(spec.worker_class, n_workers, name)
        self._pool = pool or make_pool({self.name: spec}, n_workers, timeout=timeout, devices=devices)
        # a group that nobody holds any more gives its role back; `discard` alone is safe wherever that is noticed
        self._forgotten = weakref.finalize(self, self._pool.roles.discard, self.name)
        self._forgotten.atexit = False

    @property
    def worker(self) -> Worker:
        """The worker itself, where it lives in this process. Raises ValueError where it does not."""
        if not isinstance(self._pool, ThisProcess):
            raise ValueError(f"the {self.world_size} workers of {self.name!r} live in processes of their own")
        return self._pool.workers[self.name]

    @property
    def processes(self) -> Hashable | None:
        return None if isinstance(self._pool, ThisProcess) else self._pool

    def execute(self, method: str, calls: list[Call | None]) -> Future[list]:
        return self._pool.call(self.name, method, calls)

    def shutdown(self) -> None:
        """End the role. Processes end with the last role that lives in them."""
        self._pool.release(self.name)


def make_pool(
    specs: Mapping[str, WorkerSpec],
    n_workers: int = 1,
    *,
    timeout: float = CALL_TIMEOUT,
    devices: Sequence[int] | None = None,
    env: Mapping[str, str] | None = None,
    apart: bool = False,
) -> ThisProcess | ProcessPool:
    """Where the workers of some roles live: this process, or processes of their own.

    env: further variables of the environment of these. apart: a process of its own even for one worker.
    """
    if n_workers < 1:
        raise ValueError(f"n_workers: expected at least 1, found {n_workers}")
    if devices is not None and len(devices) != n_workers:
        raise ValueError(f"devices: expected one for each of the {n_workers} workers, found {list(devices)}")
    if n_workers == 1 and devices is None and not env and not apart:
        return ThisProcess(specs)
    return ProcessPool(specs, n_workers, timeout=timeout, devices=devices, env=env)


def colocate(specs: Mapping[str, WorkerSpec], n_workers: int = 1, **where: Any) -> dict[str, LocalWorkerGroup]:
    """Several roles in the same process(es): one group per role. Their calls run one after another, in call order.

    where: timeout, devices, env and apart, as in `make_pool`.
    """
    pool = make_pool(specs, n_workers, **where)
    return {role: LocalWorkerGroup(spec, n_workers, role, pool=pool) for role, spec in specs.items()}
