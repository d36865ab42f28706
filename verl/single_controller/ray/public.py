"""Resource pools and worker groups under the names and with the arguments of public verl.

pool = RayResourcePool([2], use_gpu=False)
group = RayWorkerGroup(pool, RayClassWithInitArgs(MyWorker, config))

both = create_colocated_worker_cls({"actor": RayClassWithInitArgs(...), "critic": RayClassWithInitArgs(...)})
groups = RayWorkerGroup(pool, both).spawn(["actor", "critic"])  # role -> group, in the same processes
"""

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from verl.single_controller import Worker, WorkerGroup, WorkerSpec
from verl.single_controller.cluster import ResourcePool
from verl.single_controller.dispatch import Call
from verl.single_controller.ray import cluster
from verl.single_controller.ray.actor_pool import RayPool

#: arguments of public verl on which no result depends
_WITHOUT_EFFECT = ("bin_pack", "ray_wait_register_center_timeout")


class RayResourcePool(ResourcePool):
    """Processes of each node, one GPU each with `use_gpu`. max_colocate_count has no effect: roles share processes.

    Raises:
        ValueError: detached=True or an accelerator_type, which are not supported.
    """

    def __init__(
        self,
        process_on_nodes: Iterable[int] | None = None,
        use_gpu: bool = True,
        name_prefix: str | None = None,
        max_colocate_count: int = 10,
        detached: bool = False,
        accelerator_type: str | None = None,
    ):
        if detached or accelerator_type is not None:
            raise ValueError("RayResourcePool: expected detached=False and accelerator_type=None, others not supported")
        super().__init__(name_prefix or "pool", tuple(process_on_nodes or ()))
        object.__setattr__(self, "use_gpu", use_gpu)  # the dataclass is frozen

    store = property(lambda self: list(self.processes_per_node))


@dataclass
class ResourcePoolManager:
    """Pools by name, and the pool of each role.

    Attributes:
        resource_pool_spec: pool -> processes on each node.
        mapping: role -> pool.
        resource_pool_dict: pool -> RayResourcePool, filled by `create_resource_pool`.
    """

    resource_pool_spec: dict[str, list[int]]
    mapping: dict[Any, str]
    max_colocate_count: int = 3
    resource_pool_dict: dict[str, RayResourcePool] = field(default_factory=dict)

    def create_resource_pool(self) -> None:
        """Make the pools. Their devices are reserved when a worker group starts in them."""
        for name, processes in self.resource_pool_spec.items():
            self.resource_pool_dict[name] = RayResourcePool(processes, name_prefix=name)

    def get_resource_pool(self, role: Any) -> RayResourcePool:
        return self.resource_pool_dict[self.mapping[role]]

    def get_n_gpus(self) -> int:
        return sum(sum(processes) for processes in self.resource_pool_spec.values())


def class_of(cls: Any) -> type:
    """The class of an actor class that `ray.remote` returned; a class is returned as it is."""
    metadata = getattr(cls, "__ray_metadata__", None)
    return cls if metadata is None else metadata.modified_class.__ray_actor_class__


class RayClassWithInitArgs:
    """A worker class, or `ray.remote` of one, with the arguments of its constructor."""

    def __init__(self, cls: Any, *args: Any, **kwargs: Any):
        self.cls = class_of(cls)
        bound = inspect.signature(self.cls).bind(*args, **kwargs)
        self.spec = WorkerSpec(self.cls, {**bound.arguments, **bound.arguments.pop("kwargs", {})})

    @property
    def specs(self) -> dict[str, WorkerSpec]:
        return {self.cls.__name__: self.spec}


class _Colocated:
    """Several classes in one set of processes. `cls` is as for a single class."""

    cls = Worker

    def __init__(self, class_dict: Mapping[str, RayClassWithInitArgs]):
        self.specs = {role: each.spec for role, each in class_dict.items()}


def create_colocated_worker_cls(class_dict: Mapping[str, RayClassWithInitArgs]) -> _Colocated:
    """Classes by role that share the processes of one `RayWorkerGroup`, whose `spawn` returns the groups."""
    return _Colocated(class_dict)


class RayWorkerGroup(cluster.RayWorkerGroup):
    """The workers of one class, or of several that share their processes.

    Args:
        resource_pool: its ranks.
        ray_cls_with_init: a RayClassWithInitArgs, or the result of `create_colocated_worker_cls`.
        device_name: "cpu": without GPUs, whatever the pool says.
        worker_env: further environment variables of the processes.
        **arguments: others of public verl are a TypeError if they ask for something.
    """

    def __init__(
        self,
        resource_pool: RayResourcePool,
        ray_cls_with_init: RayClassWithInitArgs | _Colocated,
        name_prefix: str | None = None,
        device_name: str | None = None,
        worker_env: Mapping[str, str] | None = None,
        **arguments: Any,
    ):
        asked = {name: value for name, value in arguments.items() if value and name not in _WITHOUT_EFFECT}
        if asked:
            raise TypeError(f"RayWorkerGroup: {', '.join(asked)} are not supported: remove them")
        use_gpu = resource_pool.use_gpu and device_name != "cpu"
        pool = RayPool(ray_cls_with_init.specs, resource_pool, use_gpu=use_gpu, env=worker_env)
        self._roles = {
            role: cluster.RayWorkerGroup(spec, resource_pool, role, pool=pool)
            for role, spec in ray_cls_with_init.specs.items()
        }
        WorkerGroup.__init__(self, ray_cls_with_init.cls, resource_pool.world_size, next(iter(self._roles)))
        self._pool = pool

    def spawn(self, prefix_set: Iterable[str]) -> dict[str, WorkerGroup]:
        """Role -> its group, of the classes that share these processes."""
        return {role: self._roles[role] for role in prefix_set}

    def execute_all_sync(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method, also one without @register, on every rank with the same arguments; results in rank order."""
        return self.execute(method_name, [Call(args, kwargs)] * self.world_size).get()

    def execute_rank_zero_sync(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method, also one without @register, on rank 0."""
        return self.execute(method_name, [Call(args, kwargs), *[None] * (self.world_size - 1)]).get()[0]

    def shutdown(self) -> None:
        for group in self._roles.values():
            group.shutdown()
