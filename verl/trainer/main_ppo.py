"""python -m verl.trainer.main_ppo key=value ...: policy optimization, configured by keys on the command line.

`--config file.yaml` (or config=file.yaml) reads settings from a file; keys on the command line override it. Keys may be
written with or without a leading `--` or `+`.
"""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from verl.compat.hook import published_names
from verl.trainer.startup.command_line import command_line, usage

if TYPE_CHECKING:
    from verl.config import Config
    from verl.trainer.ppo_trainer import PPOTrainer

HELP = """usage: {program} [--config FILE.yaml] key=value ...

  {program} \\
      algorithm.adv_estimator=grpo \\
      data.train_files=train.parquet data.val_files=test.parquet data.train_batch_size=64 \\
      actor_rollout_ref.model.path=/path/to/model actor_rollout_ref.rollout.n=8 \\
      trainer.total_epochs=1

  --config FILE.yaml   settings from a file; keys on the command line override it
  --dry-run            run all checks, print the plan, and stop before workers start
  --verbose            with --dry-run: list the checks
  --print-config       print the resolved configuration, and stop
  --chaos LIST         inject faults, such as kill@7,nan-grad@4 (docs/trust.md)
  --help               this text; all keys: python -m verl.cli.config
"""


def main(
    arguments: list[str] | None = None,
    trainer: "type[PPOTrainer] | None" = None,
    program: str = "verl.trainer.main_ppo",
) -> int:
    """Run training. Returns the exit status.

    Args:
        arguments: None for sys.argv.
        trainer: a subclass of PPOTrainer; None for PPOTrainer. trainer.backend chooses its cluster.
        program: the name in --help: a module, or a subcommand of `verl`.

    Raises:
        TypeError: `trainer` is not a subclass of PPOTrainer.
    """
    if trainer is not None:
        from verl.trainer.ppo_trainer import PPOTrainer

        if not (isinstance(trainer, type) and issubclass(trainer, PPOTrainer)):
            raise TypeError(f"trainer: expected a subclass of PPOTrainer (the class, not an object), found {trainer!r}")

    def settings(path: str | None, overrides: list[str]) -> "Config":
        from verl.config import load_config
        from verl.config.presets import PRESETS
        from verl.trainer.startup.launch import Recipe, recipe_of
        from verl.trainer.startup.torchrun import launcher_settings

        recipe = recipe_of(trainer) if trainer is not None else Recipe()
        return load_config(
            path, overrides, base=launcher_settings() | recipe.read(), presets=PRESETS, schema=recipe.schema
        )

    def build(path: str | None, overrides: list[str]) -> "PPOTrainer":
        from verl.trainer.ppo_trainer import PPOTrainer

        return (trainer or PPOTrainer)(config_path=path, overrides=overrides)

    def start(path: str | None, overrides: list[str]) -> int:
        from verl.trainer.startup.launch import run

        return run(lambda: build(path, overrides))

    def check(path: str | None, overrides: list[str], verbose: bool) -> int:
        from verl.trainer.startup.launch import dry_run

        return dry_run(lambda: build(path, overrides), verbose)

    return command_line(arguments, usage(HELP, program), settings, start, check, _check_settings)


def main_of(config_name: str) -> Callable[[list[str] | None], int]:
    """`main` of another command of public verl.

    Args:
        config_name: the configuration of that command, unless its arguments select one.
    """

    def of_arguments(arguments: list[str] | None = None) -> int:
        given = sys.argv[1:] if arguments is None else arguments
        selects = any(argument.partition("=")[0] in ("--config-name", "-cn", "--config", "-c") for argument in given)
        return main([*([] if selects else [f"--config-name={config_name}"]), *given])

    return of_arguments


def _check_settings(path: str | None, overrides: list[str]) -> None:
    from verl.config import check_inputs
    from verl.config.checks.registered import check_built_in
    from verl.config.load import read_config
    from verl.config.presets import PRESETS

    read_config(path, overrides, presets=PRESETS, extra_checks=[check_inputs, check_built_in])


__getattr__ = published_names("verl.trainer.main_ppo")

if __name__ == "__main__":
    sys.exit(main())
