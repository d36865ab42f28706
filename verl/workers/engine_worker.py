"""What the workers around a training engine have in common: where a rank sits, and checkpoints."""

from pathlib import Path

from verl.config.schema.model import CheckpointConfig
from verl.engines.base import TrainEngine
from verl.single_controller import Coordinates, Dispatch, Worker, register


class EngineWorker(Worker):
    """A worker with a training `engine`. checkpoint: what its checkpoints hold."""

    engine: TrainEngine
    checkpoint: CheckpointConfig

    def layout(self, mesh: str | None = None) -> Coordinates:
        """Rows are split over the engine's data-parallel ranks; ranks that share a sequence get the same rows."""
        if mesh is None:
            return Coordinates(dp=self.engine.dp_rank, tp=self.engine.inner_rank)
        return super().layout(mesh)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, folder: str | Path) -> None:
        """Write the model, its optimizer and schedule under `folder`.

        With checkpoint.async_save the writing goes on after the return, until `finish_checkpoint`.
        """
        self.engine.save(Path(folder), tuple(self.checkpoint.save_contents), self.checkpoint.async_save)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def is_checkpoint_written(self) -> bool:
        """Whether nothing is being written any more, well or not."""
        return self.engine.is_saved()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def finish_checkpoint(self) -> None:
        """Wait until everything is written; raises the error of what was not."""
        self.engine.finish_save()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, folder: str | Path) -> list[str]:
        """Restore what `save_checkpoint` wrote, as far as checkpoint.load_contents names it.

        Returns the parts of the training state (optimizer, extra) that it leaves as they are.
        """
        contents = tuple(self.checkpoint.load_contents)
        self.engine.load(Path(folder), contents)
        return [part for part in ("optimizer", "extra") if part not in contents]
