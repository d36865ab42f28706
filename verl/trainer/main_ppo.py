"""python -m verl.trainer.main_ppo key=value ...: policy optimization, configured by keys on the command line.

`--config file.yaml` (or config=file.yaml) reads settings from a file; keys on the command line override it. Keys may be
written with or without a leading `--` or `+`.
"""

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from verl.trainer.command_line import command_line

if TYPE_CHECKING:
    from verl.config import Config
    from verl.trainer.base import Trainer
    from verl.trainer.launch import Address, Recipe
    from verl.trainer.ppo_trainer import PPOTrainer

TRAINER = ("verl.trainer.ppo_trainer", "PPOTrainer")
"""Module and class of the trainer, whose cluster is chosen by trainer.backend."""
TRAINERS = {"local": TRAINER, "ray": TRAINER}
"""The same by trainer.backend, for scripts of earlier releases."""

HELP = """usage: python -m {program} [--config FILE.yaml] key=value ...

  python -m {program} \\
      algorithm.adv_estimator=grpo \\
      data.train_files=train.parquet data.val_files=test.parquet data.train_batch_size=64 \\
      actor_rollout_ref.model.path=/path/to/model actor_rollout_ref.rollout.n=8 \\
      trainer.total_epochs=1

  --config FILE.yaml   settings from a file; keys on the command line override it
  --dry-run            run all checks, print the plan, and stop before workers start
  --print-config       print the resolved configuration, and stop
  --help               this text; all keys: python -m verl.cli.config
"""


def main(
    arguments: list[str] | None = None,
    trainers: "type[PPOTrainer] | Address | Mapping[str, Address]" = TRAINER,
    recipe: "Recipe | None" = None,
    program: str = "verl.trainer.main_ppo",
) -> int:
    """Run training. Returns the exit status.

    Args:
        arguments: None for sys.argv.
        trainers: the trainer class; or its module and name; or such a pair for each trainer.backend.
        recipe: what a method adds to the configuration; None for the `recipe` of the class.
        program: the module's name in --help.
    """

    def settings(path: str | None, overrides: list[str]) -> "Config":
        from verl.algorithms.presets import PRESETS
        from verl.config import load_config
        from verl.trainer.launch import Recipe

        chosen = recipe or (trainers.recipe if isinstance(trainers, type) else Recipe())
        return load_config(path, overrides, base=chosen.read(), presets=PRESETS, schema=chosen.schema)

    def build(path: str | None, overrides: list[str]) -> "Trainer":
        from verl.trainer.launch import build_trainer

        return build_trainer(path, overrides, trainers, recipe)

    def start(path: str | None, overrides: list[str]) -> int:
        from verl.trainer.launch import run

        return run(lambda: build(path, overrides))

    def check(path: str | None, overrides: list[str]) -> int:
        from verl.trainer.launch import dry_run

        return dry_run(lambda: build(path, overrides))

    return command_line(arguments, HELP.format(program=program), settings, start, check)


if __name__ == "__main__":
    sys.exit(main())
