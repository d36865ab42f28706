"""python -m verl.trainer.main_generation key=value ...: generate responses to the prompts of a file, without training.

Responses are stored while they are generated: run the same command again to resume an interrupted run.
"""

import sys
from typing import TYPE_CHECKING

from verl.config import check_inputs, load_config
from verl.config.checks.registered import check_built_in
from verl.config.inputs import check_generation
from verl.config.load import read_config
from verl.config.schema.offline import GenerationConfig
from verl.trainer.startup.command_line import command_line, usage
from verl.trainer.startup.torchrun import launcher_settings
from verl.utils.lazy import lazy_names

if TYPE_CHECKING:
    from verl.evaluation.generate import GenerationRun

__all__ = ["GenerationRun", "main"]

HELP = """usage: {program} [--config FILE.yaml] key=value ...

  {program} \\
      data.path=test.parquet data.prompt_key=prompt data.n_samples=8 data.batch_size=128 \\
      data.output_path=responses.parquet \\
      model.path=/path/to/model rollout.temperature=0.6 rollout.top_p=0.95 rollout.response_length=1024

  --config FILE.yaml   settings from a file; keys on the command line override it
  --dry-run            run all checks, print the plan, and stop before the model is loaded
  --verbose            with --dry-run: list the checks
  --print-config       print the resolved configuration, and stop
  --help               this text; all keys: python -m verl.cli.config --of generation
"""


def main(arguments: list[str] | None = None, program: str = "verl.trainer.main_generation") -> int:
    """Run the command. Returns the exit status. `program` is the name in --help."""

    def settings(path: str | None, overrides: list[str]) -> GenerationConfig:
        return load_config(path, overrides, base=launcher_settings(), schema=GenerationConfig)

    def start(path: str | None, overrides: list[str]) -> int:
        from verl.evaluation.generate import run_command

        return run_command(path, overrides)

    def plan(path: str | None, overrides: list[str], verbose: bool) -> int:
        from verl.evaluation.generate import GenerationRun
        from verl.trainer.startup.launch import dry_run

        return dry_run(lambda: GenerationRun(config_path=path, overrides=overrides), verbose)

    return command_line(arguments, usage(HELP, program), settings, start, plan, _check_settings)


def _check_settings(path: str | None, overrides: list[str]) -> None:
    checks = [check_inputs, check_generation, check_built_in]
    read_config(path, overrides, base=launcher_settings(), schema=GenerationConfig, extra_checks=checks)


__getattr__, _ = lazy_names(__name__, {"GenerationRun": "verl.evaluation.generate"})

if __name__ == "__main__":
    sys.exit(main())
