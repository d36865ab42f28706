"""Ray placement groups for the resource pools of a run."""

import logging
import time
from collections.abc import Iterable, Mapping

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from verl.single_controller.cluster import ResourcePool

logger = logging.getLogger("verl.single_controller")

START_TIMEOUT = 300.0  # default limit for the cluster to provide the resources of a run, seconds
_QUIET_SECONDS = 2.0  # before the first log line: a cluster that has the resources needs a moment
_WAIT_SECONDS = 0.5  # one wait; Ray does not handle Ctrl-C during it


def reserve(
    pools: Iterable[ResourcePool], *, use_gpu: bool = False, timeout: float = START_TIMEOUT, advice: str = ""
) -> dict[ResourcePool, PlacementGroup]:
    """Create a placement group for each pool, with one bundle per node, all on different nodes.

    Args:
        use_gpu: Request one GPU per process in addition to one CPU.
        timeout: Limit for all of them, seconds.
        advice: Shown in the error if the cluster is too small.

    Raises:
        ValueError: Ray is not initialized, or the resources were not available in time. Nothing stays reserved.
    """
    if not ray.is_initialized():
        raise ValueError("Ray is not initialized in this process: call ray.init() before you create worker groups")
    deadline = time.monotonic() + timeout
    groups: dict[ResourcePool, PlacementGroup] = {}
    try:
        for pool in pools:
            bundles = [{"CPU": n, **({"GPU": n} if use_gpu else {})} for n in pool.processes_per_node]
            groups[pool] = placement_group(bundles, strategy="STRICT_SPREAD", name=f"verl-{pool.name}")
            _wait(groups[pool], _describe(bundles), pool.name, deadline, advice)
    except BaseException:
        for group in groups.values():
            remove_placement_group(group)
        raise
    return groups


def _wait(group: PlacementGroup, required: str, name: str, deadline: float, advice: str) -> None:
    """Wait for one placement group. Logs what is missing, once and whenever the cluster changes."""
    start, logged = time.monotonic(), ""
    while not group.wait(_WAIT_SECONDS):
        available = _describe(_cpus_and_gpus(node["Resources"]) for node in ray.nodes() if node["Alive"])
        free = _format_counts(_cpus_and_gpus(ray.available_resources()))
        if time.monotonic() > deadline:
            raise ValueError(
                f"resource pool {name!r} requires {required}, which the cluster did not provide within "
                f"{time.monotonic() - start:.0f} s; it has {available}, of which {free} are free. "
                f"{advice or 'Start more nodes, or lower trainer.nnodes or trainer.n_gpus_per_node'}"
            )
        if available != logged and time.monotonic() > start + _QUIET_SECONDS:
            logged = available
            logger.warning("waiting for %s; the cluster has %s, of which %s are free", required, available, free)


def _cpus_and_gpus(resources: Mapping[str, float]) -> dict[str, float]:
    return {name: resources.get(name, 0.0) for name in ("CPU", "GPU") if name == "CPU" or name in resources}


def _format_counts(counts: Mapping[str, float]) -> str:
    return " and ".join(f"{count:g} {name}" for name, count in counts.items())


def _describe(nodes: Iterable[Mapping[str, float]]) -> str:
    """Count equal nodes: `2 nodes with 1 CPU and 1 GPU, 1 node with 4 CPU`."""
    descriptions = [_format_counts(node) for node in nodes]
    counts = [
        f"{descriptions.count(text)} node{'s' * (descriptions.count(text) > 1)} with {text}"
        for text in dict.fromkeys(descriptions)
    ]
    return ", ".join(counts) or "no nodes"
