"""Restarts: a run whose workers are lost continues from its newest checkpoint (`trainer.max_restarts`).

A restart does what running the same command again does: it ends all workers, starts new ones and loads the newest
checkpoint that is complete, so its results are those of a run that was resumed by hand. An error that appears twice in
the same step is not an accident, and ends the run.
"""

import logging
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from verl.config.fields import Schema
from verl.single_controller.worker_group import NodeLost, WorkerDied, WorkerError, WorkerTimeout
from verl.trainer.guards.operator_watch import OperatorTimeout

if TYPE_CHECKING:
    from verl.trainer.base import Trainer

logger = logging.getLogger("verl.trainer")

_LOST = (WorkerError, OperatorTimeout)
_LOST_AT_START = (WorkerDied, WorkerTimeout)  # other errors at the first start are wrong settings


class Restarts:
    """The restarts of one `fit`.

    Attributes:
        count: restarts so far.
    """

    def __init__(self, trainer: "Trainer"):
        self._trainer = trainer
        self.count = 0
        self._seen: set[tuple] = set()  # errors that have ended an attempt

    @property
    def _limit(self) -> int:
        return self._trainer.config.trainer.max_restarts

    def metrics(self) -> dict[str, float]:
        """Metrics of a step."""
        return {"training/restarts": self.count} if self._limit else {}

    def run(self, attempt: Callable[[], dict[str, float]]) -> dict[str, float]:
        """Call `attempt` until it succeeds or may not be repeated.

        Args:
            attempt: trains from the newest checkpoint. After an error, its workers have ended.

        Raises:
            Exception: the error of the last attempt, with a note that says why there is no further one.
        """
        while True:
            try:
                return attempt()
            except _LOST as error:
                reason = self._why_not(error)
                if reason is not None:
                    if self._limit:
                        error.add_note(f"no restart: {reason}")
                    raise
                self._prepare(error)

    def _why_not(self, error: Exception) -> str | None:
        """Why the run does not restart after an error; None if it does."""
        trainer = self._trainer
        signature = trainer.attempted_step, type(error), re.sub(r"\d+", "N", str(error).partition("\n")[0])
        seen = signature in self._seen and not isinstance(error, NodeLost)
        self._seen.add(signature)
        if (received := trainer.interruption.requested) is not None:
            return f"{received.name} was received"
        if self.count >= self._limit:
            return f"trainer.max_restarts is {self._limit}"
        if not trainer.ready and not isinstance(error, _LOST_AT_START):
            return "the run had not started"
        if seen:
            return f"the same error has ended step {trainer.attempted_step} before"
        if not trainer.checkpointer.can_rewind:
            return "there is no checkpoint"
        return None

    def _prepare(self, error: Exception) -> None:
        """Log the restart and rewind the trainer for the next attempt."""
        trainer, failed = self._trainer, self._trainer.attempted_step
        self.count += 1
        first_line = str(error).partition("\n")[0]
        if trainer.config.trainer.allow_smaller:
            self._fit_size(error)
        newest = trainer.checkpointer.newest_of_run()
        message = "restart %d of %d after an error in step %d, from %s, with %d processes: %s"
        values = self.count, self._limit, failed, newest or "the start", trainer.world_size, first_line
        record = logger.makeRecord(logger.name, logging.WARNING, __file__, 0, message, values, None)
        logger.handle(record)
        trainer.run.warnings.append(record)  # the record of the run that ended has been closed
        trainer.rewind()

    def _fit_size(self, error: Exception) -> None:
        """Use the devices that are left. Raises the error if the settings do not allow any smaller number of them."""
        trainer, settings = self._trainer, self._trainer.config.trainer
        now = settings.nnodes, settings.n_gpus_per_node
        sizes = trainer.cluster.sizes_left(*now)
        if sizes[:1] == [now]:
            return
        for nnodes, per_node in sizes:
            try:
                config = _resized(trainer, nnodes, per_node)
            except ValueError as reason:
                error.add_note(f"{nnodes} nodes with {per_node} processes are not possible: {reason}")
                continue
            trainer.config = trainer.run.config = trainer.checkpointer.config = config
            logger.warning(
                "the run continues with %d x %d instead of %d x %d devices, since the others are lost "
                "(trainer.allow_smaller=true)",
                *(nnodes, per_node, *now),
            )
            return
        error.add_note("no restart: the devices that are left are not sufficient")
        raise error


def _resized(trainer: "Trainer", nnodes: int, per_node: int) -> Schema:
    """The settings with another number of devices. Raises ValueError if they are not possible."""
    config = trainer.config
    size = {"nnodes": nnodes, "n_gpus_per_node": per_node}
    config = config.model_copy(update={"trainer": config.trainer.model_copy(update=size)})
    trainer.run.check_other(config)
    return config
