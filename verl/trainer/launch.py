"""From a command line to a finished run: a mistake in the set-up ends as one message, not as a stack."""

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a mistake in the configuration is told before the parts of a trainer have been imported
    from verl.trainer.base import Trainer


def build_trainer(config_path: str | None, overrides: Sequence[str]) -> "Trainer":
    """The trainer of trainer.backend: this host's processes, or a Ray cluster."""
    from verl.algorithms.presets import PRESETS
    from verl.config import check_inputs, load_config, unavailable

    config = load_config(config_path, overrides, presets=PRESETS, extra_checks=[check_inputs, unavailable])
    if config.trainer.backend == "ray":
        from verl.trainer.ray_trainer import RayPPOTrainer

        return RayPPOTrainer(config)
    from verl.trainer.local_trainer import LocalPPOTrainer

    return LocalPPOTrainer(config)


def run(build: Callable[[], "Trainer"]) -> int:
    """Build a trainer and train; the exit status.

    Whatever a user can get wrong is found while building, before a model is loaded: one message, status 1. An error in
    the run itself keeps its stack, which says where: fit -> run -> the function.
    """
    from verl.utils.tracking import setup_logging

    setup_logging()
    try:
        trainer = build()
    except (ValueError, ImportError, SyntaxError, FileNotFoundError) as error:
        return complain(error)
    trainer.fit()
    return 0


def complain(error: Exception) -> int:
    """Print an error of the set-up, with its notes and without a stack; the exit status that goes with it."""
    notes = vars(error).get("__notes__", [])
    print("\n  ".join([f"error: {error}", *notes]), file=sys.stderr)
    return 1
