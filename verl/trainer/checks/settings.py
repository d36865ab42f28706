"""Checks of the settings alone. They run before torch is imported, so that a wrong setting is reported at once."""

import sys
from collections.abc import Iterable, Iterator

from verl.config import Problem, check_code, check_data, check_models, unsupported
from verl.config.checks.settings import check_combinations
from verl.config.inputs import check_generation
from verl.config.schema import EvalConfig
from verl.config.supported import check_built_in
from verl.trainer.checks.preflight import Run


def check_fields(run: Run) -> list[Problem]:
    """Fields do not contradict each other."""
    return check_combinations(run.config)


def check_files(run: Run) -> Iterator[Problem]:
    """Models, checkpoints and data files are configured and exist."""
    if not isinstance(run.config, EvalConfig):
        yield from check_models(run.config)
    yield from check_code(run.config)
    if not run.rows_given:
        yield from check_data(run.config)


def check_generation_settings(run: Run) -> Iterator[Problem]:
    """Generation without training has an output file and one host."""
    return check_generation(run.config)


def check_options(run: Run) -> list[Problem]:
    """Values are supported."""
    return unsupported(run.config)


def check_built_in_engines(run: Run) -> list[Problem]:
    """Engines are built in, unless custom code may register others: in `imports`, or in a script that has loaded
    torch."""
    return [] if "torch" in sys.modules else check_built_in(run.config)


def check_recipe_settings(run: Run) -> Iterable[Problem]:
    """The settings are valid for the recipe."""
    return run.recipe.check(run.config) if run.recipe.check is not None else ()
