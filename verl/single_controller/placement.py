"""Which roles share processes, and on which devices these run: pure functions over plain values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from verl.registry import did_you_mean


@dataclass(frozen=True)
class ResourcePool:
    """A set of processes in which one or several roles live.

    processes_per_node: how many on each node, one for each device. devices: their numbers over all nodes, where they
    were chosen; a local group shows them to its processes, Ray takes any free ones of each node.
    """

    name: str
    processes_per_node: tuple[int, ...]
    devices: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not self.processes_per_node or min(self.processes_per_node) < 1:
            raise ValueError(
                f"resource pool {self.name!r}: expected at least one process on each of its nodes, found "
                f"{list(self.processes_per_node)}"
            )

    @property
    def world_size(self) -> int:
        return sum(self.processes_per_node)


def place_roles(
    roles: Sequence[str], placement: Mapping[str, Sequence[int] | None], nnodes: int, devices_per_node: int
) -> dict[str, ResourcePool]:
    """The pool of each role. Roles with the same devices share one pool, and so one set of processes.

    placement: `actor_devices: [0, 1]` and the like. Device d is number d % devices_per_node of node
    d // devices_per_node. A role without devices of its own is together with the actor; an actor without has all of
    them. Raises ValueError for devices that are not there, and for pools that share only some of their devices.
    """
    total = nnodes * devices_per_node
    wanted = {key.removesuffix("_devices"): list(d) for key, d in placement.items() if d is not None}
    for role, devices in wanted.items():
        if role not in roles:
            raise ValueError(f"placement.{role}_devices: this run has no role {role!r}: {did_you_mean(role, roles)}")
        if not devices or len(set(devices)) != len(devices) or not set(devices) <= set(range(total)):
            raise ValueError(
                f"placement.{role}_devices: expected different numbers from 0 to {total - 1} ({nnodes} nodes with "
                f"{devices_per_node} devices each), found {devices}"
            )
    shared = wanted.get("actor", list(range(total)))
    pools: dict[frozenset[int], ResourcePool] = {}
    found: dict[str, ResourcePool] = {}
    for role in roles:
        devices = frozenset(wanted.get(role, shared))
        for other, pool in pools.items():
            if devices & other and devices != other:
                raise ValueError(
                    f"placement: {role} on devices {sorted(devices)} and {pool.name} on {sorted(other)} share some "
                    f"devices only: give them the same devices, or none in common"
                )
        if devices not in pools:
            counts = [sum(d // devices_per_node == node for d in devices) for node in range(nnodes)]
            pools[devices] = ResourcePool(role, tuple(c for c in counts if c), tuple(sorted(devices)))
        found[role] = pools[devices]
    return found


def pools_by_name(pools: Mapping[str, Sequence[int]], roles: Mapping[str, str]) -> dict[str, ResourcePool]:
    """The pool of each role from pools with names.

    pools: name -> processes on each node, `{"main": [8, 8], "critic": [4]}`. roles: role -> name of its pool.
    Raises ValueError for a role whose pool does not exist and for a pool that no role uses.
    """
    made = {name: ResourcePool(name, tuple(counts)) for name, counts in pools.items()}
    for role, name in roles.items():
        if name not in made:
            raise ValueError(f"role {role!r}: no resource pool is called {name!r}: {did_you_mean(name, made)}")
    idle = sorted(set(made) - set(roles.values()))
    if idle:
        raise ValueError(f"no role uses the resource pool {idle[0]!r}: its devices would stand idle; remove it")
    return {role: made[name] for role, name in roles.items()}


def visible_devices(devices: Sequence[int], visible: str | None) -> str:
    """CUDA_VISIBLE_DEVICES for processes that use the GPUs `devices`, counted among those visible here now.

    >>> visible_devices([2, 3], "4,5,6,7")
    '6,7'
    """
    if visible is None:
        return ",".join(map(str, devices))
    names = [name.strip() for name in visible.split(",") if name.strip()]
    missing = [d for d in devices if d >= len(names)]
    if missing:
        raise ValueError(f"GPU {missing[0]} was asked for, but CUDA_VISIBLE_DEVICES={visible!r} shows {len(names)}")
    return ",".join(names[d] for d in devices)
