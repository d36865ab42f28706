"""Cluster: where the workers of a run execute. A trainer has a cluster; it is not one.

    cluster = make_cluster(config, "local")     # this process or processes of this host; or "ray"
    cluster.check(config)                       # before anything is loaded
    groups = cluster.start(pools, specs)        # role -> worker group
    cluster.shutdown()

Models are loaded by `start`, and nothing before it.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from verl.config import schema
from verl.processes.limits import Limits
from verl.registry import did_you_mean, load_object
from verl.single_controller.worker import WorkerSpec
from verl.single_controller.worker_group import WorkerGroup

# ---- placement of roles ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ResourcePool:
    """A set of processes that host one or more roles.

    Attributes:
        name: Shown in errors.
        processes_per_node: Number of processes on each node, one per device.
        devices: Device indices over all nodes, if they were chosen. Local processes see exactly these; on Ray any free
            devices of each node are used. Empty: the process that starts the run, whatever the cluster.
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

    @property
    def is_local(self) -> bool:
        """Whether its roles are objects of the process that starts the run."""
        return self.devices == ()


def place_roles(
    roles: Sequence[str],
    placement: Mapping[str, Sequence[int] | None],
    nnodes: int,
    devices_per_node: int,
    local_roles: Sequence[str] = (),
) -> dict[str, ResourcePool]:
    """Assign a resource pool to each role. Roles with the same devices share a pool, i.e. one set of processes.

    Args:
        placement: The config section: `{"actor_devices": [0, 1], "critic_devices": None, ...}`. Device d is device
            d % devices_per_node of node d // devices_per_node. A role without devices shares the actor's pool; the
            actor uses all devices by default.
        local_roles: roles of the process that starts the run.

    Raises:
        ValueError: A role or device does not exist, a local role has devices, or two pools overlap in some of their
            devices.
    """
    total = nnodes * devices_per_node
    configured = {key.removesuffix("_devices"): list(d) for key, d in placement.items() if d is not None}
    for role, devices in configured.items():
        if role not in roles:
            raise ValueError(f"placement.{role}_devices: this run has no role {role!r}: {did_you_mean(role, roles)}")
        if not devices or len(set(devices)) != len(devices) or not set(devices) <= set(range(total)):
            expected = (
                f"distinct numbers from 0 to {total - 1}" if total > 1 else "only device 0, the only one there is"
            )
            raise ValueError(
                f"placement.{role}_devices: expected {expected} (trainer.nnodes={nnodes} x "
                f"trainer.n_gpus_per_node={devices_per_node}), found {devices}{_fix(role, configured, nnodes, total)}"
            )
    for role in local_roles:
        if role not in roles:
            raise ValueError(f"placement.local_roles: this run has no role {role!r}: {did_you_mean(role, roles)}")
        if role in configured:
            raise ValueError(
                f"placement.local_roles has {role!r}, and placement.{role}_devices is set: use one of them"
            )
    local = ResourcePool("local", (1,), ())
    shared = configured.get("actor", list(range(total)))
    pools: dict[frozenset[int], ResourcePool] = {}
    assigned: dict[str, ResourcePool] = {}
    for role in roles:
        if role in local_roles:
            assigned[role] = local
            continue
        devices = frozenset(configured.get(role, shared))
        for other_devices, pool in pools.items():
            if devices & other_devices and devices != other_devices:
                raise ValueError(
                    f"placement: {_assignment(role, devices, configured)} and "
                    f"{_assignment(pool.name, other_devices, configured)} overlap in "
                    f"{sorted(devices & other_devices)}: give these roles the same devices, or none in common"
                )
        if devices not in pools:
            counts = [sum(d // devices_per_node == node for d in devices) for node in range(nnodes)]
            pools[devices] = ResourcePool(role, tuple(c for c in counts if c), tuple(sorted(devices)))
        assigned[role] = pools[devices]
    return assigned


def format_devices(numbers: Iterable[int]) -> str:
    """Format device numbers: "device 2", "devices 0, 1" or "devices 0-3, 6"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    ranges = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"device{'s' * (sum(map(len, runs)) > 1)} {', '.join(ranges)}"


def idle_devices(pools: Iterable[ResourcePool], nnodes: int, devices_per_node: int) -> list[int]:
    """The devices of a run that no pool has."""
    used = (range(pool.world_size) if pool.devices is None else pool.devices for pool in pools)
    return sorted(set(range(nnodes * devices_per_node)).difference(*used))


def _fix(role: str, configured: Mapping[str, Sequence[int]], nnodes: int, total: int) -> str:
    """The settings that provide the devices of a role; empty if their number is not the problem."""
    devices = configured[role]
    if not devices or min(devices) < 0 or max(devices) < total:
        return ""
    per_node = -(-(max(map(max, configured.values())) + 1) // nnodes)
    other_devices = sorted(set(range(nnodes * per_node)) - set(devices))
    actor = "" if "actor" in configured or not other_devices else f", and placement.actor_devices={other_devices}"
    return f": use trainer.n_gpus_per_node={per_node}, which counts the processes of all roles{actor}"


def _assignment(role: str, devices: Iterable[int], configured: Mapping[str, Sequence[int]]) -> str:
    unset = "" if role in configured else " (not set: all of them)"
    return f"{role}_devices={sorted(devices)}{unset}"


def visible_devices(devices: Sequence[int], visible: str | None) -> str:
    """The value of CUDA_VISIBLE_DEVICES for processes that use a subset of the GPUs visible now.

    >>> visible_devices([2, 3], "4,5,6,7")
    '6,7'

    Args:
        devices: Indices into the GPUs that this process sees.
        visible: CUDA_VISIBLE_DEVICES of this process; None if it is not set.

    Raises:
        ValueError: This process does not see that many GPUs.
    """
    if visible is None:
        return ",".join(map(str, devices))
    names = [name.strip() for name in visible.split(",") if name.strip()]
    missing = [d for d in devices if d >= len(names)]
    if missing:
        raise ValueError(
            f"expected to see GPU {missing[0]}, but CUDA_VISIBLE_DEVICES={visible!r} has {len(names)} GPUs"
        )
    return ",".join(names[d] for d in devices)


def smaller_sizes(devices: Sequence[int], nnodes: int, per_node: int) -> list[tuple[int, int]]:
    """(nodes, processes per node), at most these, that fit on nodes with these numbers of devices, the largest total
    first."""
    fitting = {count: min(nnodes, sum(available >= count for available in devices)) for count in range(1, per_node + 1)}
    sizes = [(nodes, count) for count, most in fitting.items() for nodes in range(1, most + 1)]
    return sorted(sizes, key=lambda size: (size[0] * size[1], size[1]), reverse=True)


# ---- the cluster ----------------------------------------------------------------------------------------------------

RunConfig = schema.Config | schema.SFTConfig
Pools = Mapping[str, Sequence[tuple[str, ResourcePool]]]
"""Pool name -> the roles that live in the pool, each with the pool."""


class StartedRoles(dict[str, WorkerGroup]):
    """Role -> worker group. A missing role is an error with the fix."""

    def __missing__(self, role: str) -> WorkerGroup:
        started = f"roles with workers: {', '.join(self)}" if self else "call start() first, or use fit()"
        raise RuntimeError(f"the role {role!r} has no workers: {started}")


class Cluster(Protocol):
    """Starts and stops the worker groups of a run."""

    def check(self, config: RunConfig) -> None:
        """Raise ValueError for settings that the cluster does not support. Starts nothing."""

    def start(self, pools: Pools, specs: Mapping[str, WorkerSpec]) -> dict[str, WorkerGroup]:
        """Start all pools at the same time. Returns the worker group of every role.

        Args:
            pools: pool name -> (role, pool) of each of its roles.
            specs: role -> the worker to build.

        Raises:
            Exception: the error of the first pool that failed; the other pools are shut down.
        """

    def sizes_left(self, nnodes: int, per_node: int) -> list[tuple[int, int]]:
        """(nodes, processes per node) that can be used after a loss, at most these, the largest first.

        Called between `shutdown` and the next `start`, with trainer.allow_smaller.
        """

    def shutdown(self) -> None:
        """End the worker groups and what was started for them. May be called more than once."""


#: trainer.backend -> module and function that makes its cluster from a configuration
CLUSTERS: dict[str, tuple[str, str]] = {
    "local": ("verl.single_controller.local.cluster", "local_cluster"),
    "ray": ("verl.single_controller.ray.cluster", "ray_cluster"),
}


def make_cluster(config: RunConfig, backend: str) -> Cluster:
    """Make the cluster that a configuration describes, of the backend "local" or "ray".

    Raises:
        ModuleNotFoundError: the package of the backend is not installed; a note names it.
    """
    try:
        make = load_object(*CLUSTERS[backend])
    except ModuleNotFoundError as error:
        error.add_note(f"trainer.backend={backend} needs it: pip install {error.name}")
        raise
    return make(config)


def wait_limits(config: RunConfig) -> Limits:
    """The limits of waits that the `trainer` section sets."""
    trainer = config.trainer
    limits = trainer.worker_timeout, trainer.start_timeout, trainer.wait_factor, trainer.wait_minimum
    return Limits(*limits, {} if isinstance(config, schema.SFTConfig) else _operator_limits(config))


def _operator_limits(config: schema.Config) -> dict[str, float]:
    """Operator -> seconds that scoring or sampling one response may take (reward, server and tools)."""
    reward, rollout = config.reward, config.actor_rollout_ref.rollout
    turns = rollout.multi_turn
    scoring = (reward.timeout or 0.0) * (1 + reward.retries)
    calls = turns.max_user_turns or turns.max_assistant_turns or 1
    sampling = (turns.tool_timeout or 0.0) * calls if turns.enable else 0.0
    if rollout.mode == "server":
        sampling = rollout.server.timeout
    operators = {"reward": scoring, "reward_baseline": scoring, "gen": sampling, "gen_baseline": sampling}
    return operators | {"group": sampling + scoring}  # for asynchronous training


def start_pools(
    pools: Pools,
    specs: Mapping[str, WorkerSpec],
    start: Callable[[dict[str, WorkerSpec], ResourcePool], Mapping[str, WorkerGroup]],
    env: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, WorkerGroup]:
    """`Cluster.start`: the pools start at the same time, since each takes seconds to import and load.

    start: makes the groups of the roles of one pool; those of this process are made here, after the others.
    env: variables that the workers have; this process gets them with workers.
    """
    arguments = [({role: specs[role] for role, _ in placed}, placed[0][1]) for placed in pools.values()]
    others = [(roles, pool) for roles, pool in arguments if not pool.is_local]
    # of one pool in this thread, where a breakpoint in a worker's constructor is one of this program
    groups = dict(start(*others[0])) if len(others) == 1 else _start_in_threads(others, start)
    if len(others) < len(arguments):
        os.environ.update(env)
        colocate = load_object("verl.single_controller.local.cluster", "colocate")
        try:
            for roles in (roles for roles, pool in arguments if pool.is_local):
                groups |= colocate(roles)
        except BaseException:
            for group in groups.values():
                group.shutdown()
            raise
    return groups


def _start_in_threads(
    arguments: Sequence[tuple[dict[str, WorkerSpec], ResourcePool]],
    start: Callable[[dict[str, WorkerSpec], ResourcePool], Mapping[str, WorkerGroup]],
) -> dict[str, WorkerGroup]:
    with ThreadPoolExecutor(len(arguments)) as threads:
        starting = [threads.submit(start, *pool_arguments) for pool_arguments in arguments]
    errors = [future.exception() for future in starting if future.exception() is not None]
    groups = {role: group for f in starting if f.exception() is None for role, group in f.result().items()}
    if errors:
        for group in groups.values():
            group.shutdown()
        raise errors[0]
    return groups
