"""python -m verl.trainer.main_ppo key=value ...: policy optimization, configured by keys on the command line.

`--config file.yaml` (or config=file.yaml) reads settings from a file; keys on the command line override it. Keys may be
written with or without a leading `--` or `+`.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from verl.trainer.startup.program import Program, program_help

if TYPE_CHECKING:
    from verl.trainer.ppo_trainer import PPOTrainer

HELP = program_help(
    """\\
      algorithm.adv_estimator=grpo \\
      data.train_files=train.parquet data.val_files=test.parquet data.train_batch_size=64 \\
      actor_rollout_ref.model.path=/path/to/model actor_rollout_ref.rollout.n=8 \\
      trainer.total_epochs=1"""
)

PROGRAM = Program("verl.trainer.main_ppo", HELP, "Config", "verl.trainer.ppo_trainer:PPOTrainer")


def main(
    arguments: list[str] | None = None,
    trainer: "type[PPOTrainer] | None" = None,
    program: str = PROGRAM.module,
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

    return replace(PROGRAM, trainer=trainer).main(arguments, program)


def main_of(config_name: str) -> Callable[[list[str] | None], int]:
    """`main` of another command of public verl. config_name: its configuration, unless its arguments select one."""

    def main_with_config(arguments: list[str] | None = None) -> int:
        arguments = sys.argv[1:] if arguments is None else arguments
        names = {argument.partition("=")[0] for argument in arguments}
        selects = names & {"--config-name", "-cn", "--config", "-c"}
        return main([*([] if selects else [f"--config-name={config_name}"]), *arguments])

    return main_with_config


if __name__ == "__main__":
    sys.exit(main())
