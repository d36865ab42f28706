"""python -m verl.trainer.sft_trainer key=value ...: supervised fine-tuning, configured by keys on the command line.

The class is in `verl.trainer.sft`. It is loaded at first use, so that a missing package is reported in one line.
"""

import sys
from typing import TYPE_CHECKING, Any

from verl.trainer.startup.command_line import command_line, usage

if TYPE_CHECKING:
    from verl.config.schema import SFTConfig
    from verl.trainer.sft import SFTTrainer

HELP = """usage: {program} [--config FILE.yaml] key=value ...

  {program} \\
      data.train_files=train.parquet data.prompt_key=question data.response_key=answer data.train_batch_size=64 \\
      model.path=/path/to/model optim.lr=1e-5 trainer.total_epochs=1 trainer.save_freq=100

  --config FILE.yaml   settings from a file; keys on the command line override it
  --dry-run            run all checks, print the plan, and stop before workers start
  --verbose            with --dry-run: list the checks
  --print-config       print the resolved configuration, and stop
  --help               this text; all keys: python -m verl.cli.config --of sft
"""


def main(arguments: list[str] | None = None, program: str = "verl.trainer.sft_trainer") -> int:
    """Run; returns the exit status. `program` is the name in --help."""

    def build(path: str | None, overrides: list[str]) -> "SFTTrainer":
        from verl.trainer.sft import SFTTrainer

        return SFTTrainer(config_path=path, overrides=overrides)

    def start(path: str | None, overrides: list[str]) -> int:
        from verl.trainer.startup.launch import run

        return run(lambda: build(path, overrides))

    def check(path: str | None, overrides: list[str], verbose: bool) -> int:
        from verl.trainer.startup.launch import dry_run

        return dry_run(lambda: build(path, overrides), verbose)

    def settings(path: str | None, overrides: list[str]) -> "SFTConfig":
        from verl.config import load_config
        from verl.config.schema import SFTConfig
        from verl.trainer.startup.torchrun import launcher_settings

        return load_config(path, overrides, base=launcher_settings(), schema=SFTConfig)

    return command_line(arguments, usage(HELP, program), settings, start, check, _check_settings)


def _check_settings(path: str | None, overrides: list[str]) -> None:
    from verl.config import check_inputs
    from verl.config.checks.registered import check_built_in
    from verl.config.load import read_config
    from verl.config.schema import SFTConfig

    read_config(path, overrides, schema=SFTConfig, extra_checks=[check_inputs, check_built_in])


def __getattr__(name: str) -> Any:
    if name != "SFTTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from verl.trainer.sft import SFTTrainer

    return SFTTrainer


if __name__ == "__main__":
    sys.exit(main())
