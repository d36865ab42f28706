"""The weights of the rollout: pushes to it, and what they report."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl.single_controller.worker_group import Future, WorkerGroup
from verl.tracking.formatting import format_number
from verl.trainer.ppo.canary import Canary
from verl.weight_sync import SyncReport
from verl.weight_sync.verify import format_checksum

logger = logging.getLogger("verl.trainer")

_POLL = 0.02  # seconds between two polls of calls that wait for one another


@dataclass(eq=False, repr=False)
class RolloutWeights:
    """The weights and memory phases of the rollout: awake from `push` to `sleep`.

    Args:
        separate: the rollout has separate devices, so weights are sent between processes.
        canary: checks some of the pushed weights.

    Attributes:
        version: weight version of the rollout, the number of completed training steps; None if it has no weights.
    """

    roles: Mapping[str, WorkerGroup]
    separate: bool
    canary: Canary | None = None

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin with new workers, which have no weights and are not connected."""
        self.version: int | None = None
        self._is_connected = False
        if self.canary is not None:
            self.canary.reset()

    def push(self, version: int) -> dict[str, float]:
        """Push the actor's current weights to the rollout. Returns the metrics weight_sync/*.

        Raises:
            ValueError: the ranks report different checksums.
            StaleWeightsError: the rollout does not generate with them.
        """
        reports = self._push(version)
        if len({report.checksum for report in reports}) > 1:
            sums = ", ".join(format_checksum(report.checksum) for report in reports)
            raise ValueError(f"weight sync: expected the same weights of version {version} on all ranks, found {sums}")
        self.version = version
        metrics = _push_metrics(reports, version)
        if self.canary is not None and self.canary.is_due(version):
            metrics |= self.canary.check(version)
        return metrics

    def _push(self, version: int) -> list[SyncReport]:
        """The reports of one training rank and all rollout ranks."""
        actor = self.roles["actor"]
        if not self.separate:
            return actor.push_weights(version)
        self._connect()
        rollout = self.roles["rollout"]
        sent, received = _get_all(actor.submit("push_weights", version), rollout.submit("receive_weights", version))
        return [*sent[:1], *received]

    def require(self, version: int) -> None:
        """Push unless the rollout already has this version."""
        if self.version != version:
            self.push(version)

    def sleep(self) -> None:
        """Free the memory that only generation needs, including the rollout's copy of the weights, if any."""
        self.roles["rollout"].sleep_rollout()
        self.version = None

    def _connect(self) -> None:
        """Connect training rank 0 and all rollout ranks in one process group, once."""
        if self._is_connected:
            return
        actor, rollout = self.roles["actor"], self.roles["rollout"]
        rollout.check_receiver()
        address, size = actor.transfer_address(), 1 + rollout.world_size
        _get_all(
            actor.submit("connect_to_rollout", address, size),
            rollout.submit("connect_to_actor", address, size),
        )
        self._is_connected = True


def _push_metrics(reports: Sequence[SyncReport], version: int) -> dict[str, float]:
    """The metrics weight_sync/* of a push; the log has its cost."""
    size, seconds = max(report.bytes for report in reports), max(report.seconds for report in reports)
    metrics = {"weight_sync/version": version, "weight_sync/bytes": size, "weight_sync/seconds": seconds}
    if kept := max(report.kept for report in reports):
        metrics["weight_sync/kept_bytes"] = kept
    if not size:
        return metrics
    metrics["weight_sync/gb_per_second"] = size / seconds / 1e9
    logger.info("[sync_weights] version %d: %sB in %.3g s", version, format_number(size), seconds)
    return metrics


def _get_all(*futures: Future) -> list[Any]:
    """Wait for calls that communicate with each other. Returns all results, or raises the first error."""
    results: dict[int, Any] = {}
    while len(results) < len(futures):
        for i, future in enumerate(futures):
            if i not in results:
                try:
                    results[i] = future.get(timeout=_POLL)
                except TimeoutError:
                    continue
    return [results[i] for i in range(len(futures))]
