"""What a method adds to the configuration of its trainer."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.config import Config, Problem
from verl.config.fields import Schema

if TYPE_CHECKING:
    from verl.trainer.startup.inputs import Inputs


@dataclass(frozen=True)
class Recipe:
    """What a method adds to the configuration.

    Attributes:
        name: the method's name in messages.
        settings: a YAML file below the user's settings.
        schema: the config schema, if the method has additional keys.
        check: problems of the settings, if any; part of the preflight checks.
        check_inputs: raises ValueError for data that the method does not support; part of the preflight checks.
        scores_training: settings -> whether training responses are scored, so that they need a ground truth; None: yes.
    """

    name: str | None = None
    settings: Path | None = None
    schema: type[Schema] = Config
    check: Callable[[Any], Iterable[Problem]] | None = None
    check_inputs: "Callable[[Any, Inputs], None] | None" = None
    scores_training: Callable[[Any], bool] | None = None

    def read(self) -> dict[str, Any]:
        """The settings of the file, interpolations not yet resolved."""
        if self.settings is None:
            return {}
        from omegaconf import OmegaConf

        return OmegaConf.to_container(OmegaConf.load(self.settings), resolve=False)


def recipe_of(trainer: type) -> Recipe:
    """The recipe of a trainer class. Raises ValueError if it is not a Recipe."""
    if not isinstance(trainer.recipe, Recipe):
        name = f"{trainer.__name__}.recipe"
        raise ValueError(f"{name}: expected a Recipe, found {trainer.recipe!r}: remove it, or set it to Recipe(...)")
    return trainer.recipe
