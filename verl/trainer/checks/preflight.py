"""Preflight: all checks before the first step, in one ordered list.

    run = read_run(...)                # SETTINGS: before torch is imported; all problems at once
    run = prepare_run(...)             # IMPORTS, all problems at once; then CONFIG, one by one
    run.inputs = load_inputs(...)
    run_checks(run, INPUTS)            # of tokenizer, datasets and rewards
    run_checks(run, FLOW)              # after the trainer has compiled its flow

No weights are loaded before the last check has passed. `--dry-run` on any command runs the list and stops. A new check
is one function of a `Run`, in a module of this package, and one line in `CHECKS`. The module is imported when the check
runs: those of SETTINGS do not import torch.
"""

import inspect
import logging
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.config import ConfigError, Problem, check_code, check_data, check_models
from verl.config.checks.run import check_built_in
from verl.config.fields import Schema, to_flat_dict
from verl.config.inputs import check_code_file
from verl.config.load import Reading, read_config
from verl.config.schema import Config, EvalConfig, GenerationConfig, SFTConfig
from verl.config.sources import Overrides
from verl.registry import import_module
from verl.trainer.startup.torchrun import launcher_settings
from verl.utils.redaction import remember_settings

if TYPE_CHECKING:
    from verl.single_controller.cluster import Cluster
    from verl.trainer.startup.inputs import Inputs

# ---- recipes --------------------------------------------------------------------------------------------------------


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


# ---- the checks of a run --------------------------------------------------------------------------------------------

SETTINGS, IMPORTS, CONFIG, INPUTS, FLOW = "settings", "imports", "config", "inputs", "flow"
"""When a check runs: on settings alone; on settings with the modules that they import; on settings whose problems have
all been reported; on the loaded inputs; on the compiled flow."""

TRAINING = (Config, SFTConfig)


@dataclass
class Run:
    """A run before its first step. Later stages fill later attributes.

    Attributes:
        rows_given: the training dataset was given as an object, so no file has to exist.
        reading: how the settings were read; None: they were given as an object.
        train_dataset, val_dataset, reward: those that were given as objects.
        cluster: set from stage CONFIG on; None for commands without workers.
        reward_values: names of the values that the reward function returned in its trial call.
        columns: columns that the operators write; set from stage FLOW on.
        passed: names of checks.
        warnings: what the checks have logged as warnings.
        is_recorded: whether its folder has results of this run, rather than none or those of an earlier run.
        working_dir: where the run started; relative paths refer to it, also if user code changes the directory.
    """

    config: Schema
    recipe: Recipe = field(default_factory=Recipe)
    rows_given: bool = False
    reading: Reading | None = None
    train_dataset: Any = None
    val_dataset: Any = None
    reward: Any = None
    backend: str = "local"
    cluster: "Cluster | None" = None
    inputs: "Inputs | None" = None  # from stage INPUTS on
    reward_values: set[str] = field(default_factory=set)
    columns: set[str] = field(default_factory=set)
    passed: list[str] = field(default_factory=list)
    warnings: list[logging.LogRecord] = field(default_factory=list)
    is_recorded: bool = False
    working_dir: Path = field(default_factory=Path.cwd)

    def check_other(self, config: Schema) -> None:
        """Raise ValueError if the run could not continue with other settings."""
        run = replace(self, config=config, reading=None, passed=[], warnings=[])
        check_settings(run, SETTINGS, IMPORTS)
        run_checks(run, CONFIG)


Settings = Run | Schema | Mapping[str, Any] | str | Path | None
"""A run of the command line, a configuration object, a dictionary with nested or dotted keys, or a YAML file."""


@dataclass(frozen=True)
class Check:
    """One check of a run.

    Attributes:
        name: printed by `--dry-run --verbose`.
        stage: SETTINGS, IMPORTS, CONFIG, INPUTS or FLOW.
        function: "module.function" in this package, or "package.module:function". It has one parameter, the Run, or the
            settings if its name is `config`, and raises ValueError or returns problems.
        schemas: those that it applies to.
    """

    name: str
    stage: str
    function: str
    schemas: type[Schema] | tuple[type[Schema], ...] = TRAINING

    def __call__(self, run: Run) -> Iterable[Problem]:
        function = pkgutil.resolve_name(self.function if ":" in self.function else f"{__package__}.{self.function}")
        (parameter,) = inspect.signature(function).parameters
        return function(run.config if parameter == "config" else run) or ()


CHECKS: tuple[Check, ...] = (
    Check("settings fit together", SETTINGS, "verl.config.load:check_combinations", Schema),
    Check("files exist", SETTINGS, "preflight.check_files", Schema),
    Check("generation", SETTINGS, "verl.config.inputs:check_generation", GenerationConfig),
    Check("built-in engines", SETTINGS, "preflight.check_built_in_engines", (*TRAINING, GenerationConfig)),
    Check("recipe settings", SETTINGS, "preflight.check_recipe_settings"),
    Check("imports", IMPORTS, "preflight.check_imports", Schema),
    Check("registered engines", IMPORTS, "config.check_engines", (*TRAINING, GenerationConfig)),
    Check("launcher", CONFIG, "verl.trainer.startup.torchrun:check_launcher", (*TRAINING, GenerationConfig)),
    Check("trackers", CONFIG, "config.check_tracker_names"),
    Check("output folders", CONFIG, "config.check_output_folders"),
    Check("critic", CONFIG, "config.check_critic_settings", Config),
    Check("reward model", CONFIG, "config.check_reward_model", Config),
    Check("agent loop", CONFIG, "agents.check_agent_loop", (Config, GenerationConfig)),
    Check("estimator and loss", CONFIG, "config.check_required_settings", Config),
    Check("code of the workers", CONFIG, "config.check_worker_code", Config),
    Check("group size", CONFIG, "config.check_group_size", Config),
    Check("rollout correction", CONFIG, "verl.trainer.ppo.rollout_correction:check_correction", Config),
    Check("placement", CONFIG, "config.check_placement", Config),
    Check("dataset class", CONFIG, "config.check_dataset_class"),
    Check("model configs", CONFIG, "models.check_models", (*TRAINING, GenerationConfig)),
    Check("cluster", CONFIG, "config.check_cluster"),
    Check("trained weights", CONFIG, "models.warn_of_narrow_weights"),
    Check("devices", CONFIG, "models.check_devices"),
    Check("memory", CONFIG, "planning.check_memory", Config),
    Check("micro-batch losses", CONFIG, "config.check_micro_batch_losses", Config),
    Check("unused settings", CONFIG, "config.warn_of_unused_settings", (*TRAINING, GenerationConfig)),
    Check("checkpoints", CONFIG, "config.check_saving"),
    Check("dataset items", INPUTS, "inputs.check_items", Config),
    Check("validation data", INPUTS, "inputs.check_validation_data"),
    Check("tools in prompts", INPUTS, "agents.check_tools_of_run", Config),
    Check("model limits", INPUTS, "inputs.check_model_limits"),
    Check("recipe data", INPUTS, "inputs.check_recipe_inputs"),
    Check("reward function", INPUTS, "inputs.check_reward_function", Config),
    Check("reward names", FLOW, "inputs.check_reward_names", Config),
)
"""Every check, in the order in which they run."""


def checks_of(config: Schema, *stages: str) -> list[Check]:
    """The checks of some stages that apply to a configuration, in order."""
    return [check for check in CHECKS if check.stage in stages and isinstance(config, check.schemas)]


def base_settings(recipe: Recipe) -> dict[str, Any]:
    """Settings that user settings override: of torchrun and of the recipe."""
    return (launcher_settings() if "trainer" in recipe.schema.model_fields else {}) | recipe.read()


def read_run(
    path: str | Path | Mapping[str, Any] | None,
    overrides: Overrides,
    recipe: Recipe,
    *stages: str,
    base: Mapping[str, Any] | None = None,
    rows_given: bool = False,
) -> Run:
    """Read the settings, and run the checks of the stages, of SETTINGS and IMPORTS.

    Args:
        path: a file or a dictionary; `overrides` are above it, `base` and the settings of the recipe below.
        rows_given: see `Run`.

    Raises:
        ConfigError: all problems, with file and line of each setting.
    """
    passed: list[str] = []

    def problems(config: Schema) -> Iterator[Problem]:
        return _problems(Run(config, recipe, rows_given, passed=passed), *stages)

    base = base_settings(recipe) | dict(base or {})
    reading = read_config(path, overrides, base=base, schema=recipe.schema, checks=[problems])
    remember_settings(to_flat_dict(reading.config))
    return Run(reading.config, recipe, rows_given, reading, passed=passed)


def open_run(
    settings: Settings,
    overrides: Overrides,
    recipe: Recipe,
    *,
    base: Mapping[str, Any] | None = None,
    rows_given: bool = False,
) -> Run:
    """A run that has passed SETTINGS and IMPORTS. Logs what may surprise in its settings. A run of the command line has
    passed SETTINGS already, but for the checks of a recipe; other arguments as in `read_run`."""
    if isinstance(settings, Run) and not overrides:
        run = replace(settings, recipe=recipe)
        if problems := [*check_recipe_settings(run)]:
            raise ConfigError(problems) if run.reading is None else run.reading.error(problems)
        check_settings(run, IMPORTS)
    elif isinstance(settings, Run | Schema):
        settings = settings.config if isinstance(settings, Run) else settings
        run = Run(settings.with_overrides(overrides) if overrides else settings, recipe, rows_given)
        check_settings(run, SETTINGS, IMPORTS)
    else:
        run = read_run(settings, overrides, recipe, SETTINGS, IMPORTS, base=base, rows_given=rows_given)
    if run.reading is not None:
        run.reading.log_notes()
    return run


def check_settings(run: Run, *stages: str) -> None:
    """Run the checks of SETTINGS or IMPORTS. Raises ConfigError with all problems, with file and line if known."""
    if problems := [*_problems(run, *stages)]:
        raise ConfigError(problems) if run.reading is None else run.reading.error(problems)


def _problems(run: Run, *stages: str) -> Iterator[Problem]:
    for check in checks_of(run.config, *stages):
        yield from check(run)
        run.passed.append(check.name)


def run_checks(run: Run, stage: str) -> None:
    """Run the checks of CONFIG, INPUTS or FLOW in order, until one fails. Those of INPUTS all run.

    Raises:
        ConfigError: the problems that a check has found.
        ValueError: the error of a check, or of a module, file or package that it loads; or several, numbered.
    """
    from verl.tracking.run_record import collected  # imports rich

    failures: list[ValueError] = []
    for check in checks_of(run.config, stage):
        try:
            with collected(run.warnings):
                problems = [*check(run)]
            if problems:
                raise ConfigError(problems)
        except ValueError as error:
            failures.append(error)
            if stage != INPUTS:  # later checks build on it
                break
        else:
            run.passed.append(check.name)
    if len(failures) > 1:
        listed = "\n".join(f"  {number}. {error}" for number, error in enumerate(failures, 1))
        raise ValueError(f"{len(failures)} problems of model and data:\n{listed}") from failures[0]
    if failures:
        raise failures[0]


# ---- SETTINGS and IMPORTS -------------------------------------------------------------------------------------------


def check_files(run: Run) -> Iterator[Problem]:
    """Models, checkpoints and data files are configured and exist."""
    if not isinstance(run.config, EvalConfig):
        yield from check_models(run.config)
    yield from check_code(run.config)
    if not run.rows_given:
        yield from check_data(run.config)


def check_built_in_engines(run: Run) -> list[Problem]:
    """Engines are built in, unless custom code may register others: in `imports`, or in a script that has loaded
    torch."""
    return [] if "torch" in sys.modules else check_built_in(run.config)


def check_recipe_settings(run: Run) -> Iterable[Problem]:
    """The settings are valid for the recipe."""
    return run.recipe.check(run.config) if run.recipe.check is not None else ()


def check_imports(config: Schema) -> None:
    """Import the user's files and modules, which register losses, estimators and rewards."""
    for address in config.imports:
        if not [*check_code_file("imports", address)]:  # a missing one is a problem of `check_files`
            import_module(address)
