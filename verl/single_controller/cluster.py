"""Cluster: where the workers of a run execute. A trainer has a cluster; it is not one.

    cluster = make_cluster(config, "local")     # this process or processes of this host; or "ray"
    cluster.check(config)                       # before anything is loaded
    groups = cluster.start(pools, specs)        # role -> worker group
    cluster.shutdown()

Models are loaded by `start`, and nothing before it.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from verl.config import schema
from verl.processes.limits import Limits
from verl.registry import load_object
from verl.single_controller.placement import ResourcePool
from verl.single_controller.worker import WorkerSpec
from verl.single_controller.worker_group import WorkerGroup

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
) -> dict[str, WorkerGroup]:
    """`Cluster.start`: the pools start at the same time, since each takes seconds to import and load.

    start: makes the groups of the roles of one pool.
    """
    arguments = [({role: specs[role] for role, _ in placed}, placed[0][1]) for placed in pools.values()]
    if len(arguments) == 1:  # in this thread, where a breakpoint in a worker's constructor is one of this program
        return dict(start(*arguments[0]))
    with ThreadPoolExecutor(len(arguments)) as threads:
        starting = [threads.submit(start, *pool_arguments) for pool_arguments in arguments]
    errors = [future.exception() for future in starting if future.exception() is not None]
    groups = {role: group for f in starting if f.exception() is None for role, group in f.result().items()}
    if errors:
        for group in groups.values():
            group.shutdown()
        raise errors[0]
    return groups
