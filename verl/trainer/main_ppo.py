"""python -m verl.trainer.main_ppo key=value ...: policy optimisation, set up by keys on the command line.

A YAML file may come first (`--config file.yaml`, or config=file.yaml); keys on the command line win over it. Keys may
be written with or without a leading `--` or `+`.
"""

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from verl.trainer.command_line import command_line

if TYPE_CHECKING:
    from verl.config import Config
    from verl.trainer.launch import Recipe

Address = tuple[str, str]

TRAINERS: dict[str, Address] = {
    "local": ("verl.trainer.local_trainer", "LocalPPOTrainer"),
    "ray": ("verl.trainer.ray_trainer", "RayPPOTrainer"),
}
"""trainer.backend -> module and class of the trainer."""

HELP = """usage: python -m {program} [--config FILE.yaml] key=value ...

  python -m {program} \\
      algorithm.adv_estimator=grpo \\
      data.train_files=train.parquet data.val_files=test.parquet data.train_batch_size=64 \\
      actor_rollout_ref.model.path=/path/to/model actor_rollout_ref.rollout.n=8 \\
      trainer.total_epochs=1

  --config FILE.yaml   settings from a file; keys on the command line win
  --print-config       show the settings that would be used, and stop
  --help               this text; all keys: python -m verl.cli.config
"""


def main(
    arguments: list[str] | None = None,
    trainers: Mapping[str, Address] = TRAINERS,
    recipe: "Recipe | None" = None,
    program: str = "verl.trainer.main_ppo",
) -> int:
    """Run; returns the exit status.

    trainers: trainer.backend -> module and class of the trainer. recipe: what a method adds to the configuration.
    program: the module's name, for the help.
    """

    def settings(path: str | None, overrides: list[str]) -> "Config":
        from verl.algorithms.presets import PRESETS
        from verl.config import load_config

        chosen = _recipe(recipe)
        return load_config(path, overrides, base=chosen.read(), presets=PRESETS, schema=chosen.tree)

    def start(path: str | None, overrides: list[str]) -> int:
        from verl.trainer.launch import build_trainer, run

        return run(lambda: build_trainer(path, overrides, trainers, _recipe(recipe)))

    return command_line(arguments, HELP.format(program=program), settings, start)


def _recipe(given: "Recipe | None") -> "Recipe":
    from verl.trainer.launch import Recipe

    return given or Recipe()


if __name__ == "__main__":
    sys.exit(main())
