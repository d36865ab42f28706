"""python -m verl.trainer.main_ppo key=value ...: policy optimisation, set up by keys on the command line.

A YAML file may come first (`--config file.yaml`, or config=file.yaml); keys on the command line win over it. Keys may
be written with or without a leading `--` or `+`.
"""

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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


def split_arguments(arguments: list[str]) -> tuple[str | None, list[str], set[str]]:
    """(config file, key=value overrides, flags) of a command line."""
    path, overrides, flags = None, [], set()
    rest = iter(arguments)
    for argument in rest:
        if argument in ("--config", "-c"):
            path = next(rest, None)
            if path is None:
                raise ValueError("--config needs a file name after it")
        elif argument.startswith(("--config=", "config=")):
            path = argument.split("=", 1)[1]
        elif argument in ("--help", "-h", "--print-config"):
            flags.add(argument)
        else:
            overrides.append(argument)
    return path, overrides, flags


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
    try:
        path, overrides, flags = split_arguments(sys.argv[1:] if arguments is None else arguments)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if flags & {"--help", "-h"}:
        print(HELP.format(program=program))
        return 0
    from verl.trainer.launch import Recipe, build_trainer, run

    recipe = recipe or Recipe()
    if "--print-config" in flags:
        return _print_config(path, overrides, recipe)
    return run(lambda: build_trainer(path, overrides, trainers, recipe))


def _print_config(path: str | None, overrides: list[str], recipe: "Recipe") -> int:
    from verl.algorithms.presets import PRESETS
    from verl.config import dump_config, load_config

    try:
        config = load_config(path, overrides, base=recipe.read(), presets=PRESETS, tree=recipe.tree)
        print(dump_config(config, everything=True))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
