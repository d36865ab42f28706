"""From a command line to a finished run: a mistake in the set-up ends as one message, not as a stack."""

import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from verl.config import Config, check_inputs, load_config, unsupported
from verl.registry import load_object
from verl.trainer.command_line import MISTAKES, complain
from verl.utils.disk import DiskFullError

if TYPE_CHECKING:
    from verl.trainer.base import Trainer


@dataclass(frozen=True)
class Recipe:
    """What a method adds to the configuration.

    name: as the method is called in messages. settings: a YAML file that stands below the user's settings. tree: the
    keys, where the method has some of its own.
    """

    name: str | None = None
    settings: Path | None = None
    tree: type[Config] = Config

    def read(self) -> dict[str, Any]:
        """The settings of the file, interpolations not yet resolved."""
        return OmegaConf.to_container(OmegaConf.load(self.settings), resolve=False) if self.settings else {}


def build_trainer(
    config_path: str | None, overrides: Sequence[str], trainers: Mapping[str, tuple[str, str]], recipe: Recipe
) -> "Trainer":
    """The trainer of trainer.backend: this host's processes, or a Ray cluster. Arguments as those of main_ppo."""
    from verl.algorithms.presets import PRESETS

    checks = [check_inputs, unsupported]
    config = load_config(
        config_path, overrides, base=recipe.read(), presets=PRESETS, schema=recipe.tree, extra_checks=checks
    )
    try:
        trainer = load_object(*trainers[config.trainer.backend])
    except ModuleNotFoundError as error:
        error.add_note(f"trainer.backend={config.trainer.backend} needs it: pip install {error.name}")
        raise
    return trainer(config)


def run(build: "Callable[[], Trainer]") -> int:
    """Build a trainer and train; the exit status.

    Whatever a user can get wrong is found while building, before a model is loaded, or while the workers are set up:
    one message, status 1, and so is a full disk. Another error in the run itself keeps its stack, which says where:
    fit -> run -> the function. Ctrl-C and SIGTERM end the workers; the message says from where the run can go on.
    Status 130 or 143, as usual.
    """
    from verl.tracking.tracking import setup_logging

    setup_logging()
    try:
        trainer = build()
    except MISTAKES as error:
        return complain(error)
    usual = signal.signal(signal.SIGTERM, _terminated)
    try:
        trainer.fit()
    except KeyboardInterrupt as stop:
        number = signal.SIGTERM if isinstance(stop, Terminated) else signal.SIGINT
        print(f"\nstopped by {number.name} {trainer.where_it_stands()}", file=sys.stderr)
        return 128 + number
    except DiskFullError as error:
        return complain(error)
    except Exception as error:
        if not trainer.ready and isinstance(error, ValueError):
            return complain(error)
        error.add_note(f"the run failed {trainer.where_it_stands()}")
        raise
    finally:
        signal.signal(signal.SIGTERM, usual)
    return 0


class Terminated(KeyboardInterrupt):
    """SIGTERM: a scheduler or a person ends the run."""


def _terminated(number: int, frame: object) -> None:
    raise Terminated
