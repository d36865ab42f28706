"""Worker groups whose ranks are Ray actors.

    ray.init()
    groups = colocate({"actor": actor_spec, "ref": ref_spec}, ResourcePool("main", (8, 8)), use_gpu=True)
    log_probs = groups["ref"].compute_log_prob(batch)   # 16 ranks on two nodes, shared by both roles

`actor_pool` has the controller's side of the actors, `rank_actor` the actor itself.
"""

from collections.abc import Hashable, Mapping
from typing import Any

from verl.processes.limits import Limits
from verl.single_controller.dispatch import Call
from verl.single_controller.placement import ResourcePool
from verl.single_controller.ray.actor_pool import RayPool
from verl.single_controller.ray.placement import START_TIMEOUT
from verl.single_controller.worker import WorkerSpec
from verl.single_controller.worker_group import CALL_TIMEOUT, Future, WorkerGroup


class RayWorkerGroup(WorkerGroup):
    """A Worker class over the ranks of a resource pool, as Ray actors.

    Requires `ray.init()`. The actors hold their resources until `shutdown`, which a `with` block calls.

    Args:
        spec: How to construct the workers.
        resources: Number of processes on each node.
        name: Role shown in errors; the name of the class by default.
        use_gpu: Request one GPU per process.
        timeout: Limit of one call, seconds; or limits by measured durations.
        start_timeout: Limit for the cluster to start the processes, seconds.
        pool: Existing actors that host this role already (see `colocate`); `use_gpu` and the limits are then ignored.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        resources: ResourcePool,
        name: str | None = None,
        *,
        use_gpu: bool = False,
        timeout: float | Limits = CALL_TIMEOUT,
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
        """Release the role. The actors stop when their last role is released."""
        self._pool.release(self.name)


def colocate(specs: Mapping[str, WorkerSpec], resources: ResourcePool, **options: Any) -> dict[str, RayWorkerGroup]:
    """Run several roles in the actors of one resource pool. Their calls run one after another, in call order.

    Args:
        specs: Role -> how to construct its workers.
        resources: Number of processes on each node.
        **options: use_gpu, timeout, start_timeout, env and placement of `RayPool`.

    Returns:
        One group per role.
    """
    pool = RayPool(specs, resources, **options)
    return {role: RayWorkerGroup(spec, resources, role, pool=pool) for role, spec in specs.items()}
