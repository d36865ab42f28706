"""Worker groups whose ranks are Ray actors.

    ray.init()
    groups = colocate({"actor": actor_spec, "ref": ref_spec}, ResourcePool("main", (8, 8)), use_gpu=True)
    log_probs = groups["ref"].compute_log_prob(batch)   # 16 ranks on two nodes, shared by both roles

`actor_pool` has the controller's side of the actors, `rank_actor` the actor itself.
"""

from collections.abc import Mapping
from typing import Any

from verl.single_controller.placement import ResourcePool
from verl.single_controller.ray.actor_pool import RayPool
from verl.single_controller.worker import WorkerSpec
from verl.single_controller.worker_group import WorkerGroup


class RayWorkerGroup(WorkerGroup):
    """A Worker class over the ranks of a resource pool, as Ray actors.

    Requires `ray.init()`. The actors hold their resources until `shutdown`, which a `with` block calls.

    Args:
        name: Role shown in errors; the name of the class by default.
        pool: Existing actors that host this role already (see `colocate`).
        **options: Otherwise those of `RayPool`.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        resources: ResourcePool,
        name: str | None = None,
        *,
        pool: RayPool | None = None,
        **options: Any,
    ):
        super().__init__(spec.worker_class, resources.world_size, name)
        self._pool = pool or RayPool({self.name: spec}, resources, **options)


def colocate(specs: Mapping[str, WorkerSpec], resources: ResourcePool, **options: Any) -> dict[str, RayWorkerGroup]:
    """Run several roles in the actors of one pool, with the arguments of `RayPool`. Their calls run one after another,
    in call order."""
    pool = RayPool(specs, resources, **options)
    return {role: RayWorkerGroup(spec, resources, role, pool=pool) for role, spec in specs.items()}
