"""What a run asks of a Ray cluster: a placement group for each resource pool, awaited aloud."""

import logging
import time
from collections.abc import Iterable, Mapping

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from verl.single_controller.placement import ResourcePool

logger = logging.getLogger("verl.single_controller")

START_TIMEOUT = 300.0  # seconds that the cluster may take to give what a run asks for
_PATIENCE = 2.0  # seconds that a cluster which has all of it may need
_SLICE = 0.5  # seconds of one look: Ray does not hear Ctrl-C while it waits


def reserve(
    pools: Iterable[ResourcePool], *, use_gpu: bool = False, timeout: float = START_TIMEOUT, advice: str = ""
) -> dict[ResourcePool, PlacementGroup]:
    """A placement group for each pool, with one bundle for each of its nodes, all on different nodes.

    timeout: seconds for all of them. advice: what to do where the cluster is too small, said in the error. Raises
    ValueError without Ray, and when the cluster does not give all in time; nothing is kept then.
    """
    if not ray.is_initialized():
        raise ValueError("Ray is not running in this process: call ray.init() before making worker groups on it")
    deadline = time.monotonic() + timeout
    groups: dict[ResourcePool, PlacementGroup] = {}
    try:
        for pool in pools:
            bundles = [{"CPU": n, **({"GPU": n} if use_gpu else {})} for n in pool.processes_per_node]
            groups[pool] = placement_group(bundles, strategy="STRICT_SPREAD", name=f"verl-{pool.name}")
            _wait(groups[pool], _words(bundles), pool.name, deadline, advice)
    except BaseException:
        for group in groups.values():
            remove_placement_group(group)
        raise
    return groups


def _wait(group: PlacementGroup, wanted: str, name: str, deadline: float, advice: str) -> None:
    """Wait for one placement group, and say what is missing: at first, and whenever the cluster has changed."""
    start, said = time.monotonic(), ""
    while not group.wait(_SLICE):
        present = _words(_counts(node["Resources"]) for node in ray.nodes() if node["Alive"])
        free = _amounts(_counts(ray.available_resources()))
        if time.monotonic() > deadline:
            raise ValueError(
                f"resource pool {name!r} asks for {wanted}, which the cluster did not give within "
                f"{time.monotonic() - start:.0f} s; it has {present}, of which {free} are free. "
                f"{advice or 'Start more nodes, or lower trainer.nnodes or trainer.n_gpus_per_node'}"
            )
        if present != said and time.monotonic() > start + _PATIENCE:
            said = present
            logger.warning("waiting for %s; the cluster has %s, of which %s are free", wanted, present, free)


def _counts(resources: Mapping[str, float]) -> dict[str, float]:
    return {name: resources.get(name, 0.0) for name in ("CPU", "GPU") if name == "CPU" or name in resources}


def _amounts(counts: Mapping[str, float]) -> str:
    return " and ".join(f"{count:g} {name}" for name, count in counts.items())


def _words(nodes: Iterable[Mapping[str, float]]) -> str:
    """`2 nodes with 1 CPU and 1 GPU`; nodes that differ one by one."""
    each = [_amounts(node) for node in nodes]
    alike = [f"{each.count(text)} node{'s' * (each.count(text) > 1)} with {text}" for text in dict.fromkeys(each)]
    return ", ".join(alike) or "no nodes"
