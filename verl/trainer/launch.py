"""From a command line to a finished run: a mistake in the set-up ends as one message, not as a stack."""

import logging
import sys
from collections.abc import Callable

from verl.trainer.base import Trainer

logger = logging.getLogger("verl")


def run(build: Callable[[], Trainer]) -> int:
    """Build a trainer and train; the exit status.

    Whatever a user can get wrong is found while building, before a model is loaded: one message, status 1. An error in
    the run itself keeps its stack, which says where: fit -> run -> the function.
    """
    from verl.utils.tracking import setup_logging

    setup_logging()
    try:
        trainer = build()
    except (ValueError, ImportError, FileNotFoundError) as error:
        return complain(error)
    trainer.fit()
    return 0


def complain(error: Exception) -> int:
    """Print an error of the set-up, with its notes and without a stack; the exit status that goes with it."""
    notes = vars(error).get("__notes__", [])
    print("\n  ".join([f"error: {error}", *notes]), file=sys.stderr)
    return 1
