"""python -m verl.trainer.main_generation key=value ...: generate responses to the prompts of a file, without training.

Responses are stored while they are generated: run the same command again to resume an interrupted run.
"""

import sys

from verl.config import load_config
from verl.config.schema.offline import GenerationConfig
from verl.evaluation.generate import GenerationRun, run_command
from verl.trainer.command_line import command_line, usage
from verl.trainer.launch import dry_run
from verl.trainer.torchrun import launcher_settings

__all__ = ["GenerationRun", "main"]

HELP = """usage: {program} [--config FILE.yaml] key=value ...

  {program} \\
      data.path=test.parquet data.prompt_key=prompt data.n_samples=8 data.batch_size=128 \\
      data.output_path=responses.parquet \\
      model.path=/path/to/model rollout.temperature=0.6 rollout.top_p=0.95 rollout.response_length=1024

  --config FILE.yaml   settings from a file; keys on the command line override it
  --dry-run            run all checks, print the plan, and stop before the model is loaded
  --print-config       print the resolved configuration, and stop
  --help               this text; all keys: python -m verl.cli.config --of generation
"""


def main(arguments: list[str] | None = None, program: str = "verl.trainer.main_generation") -> int:
    """Run the command. Returns the exit status. `program` is the name in --help."""
    return command_line(
        arguments,
        usage(HELP, program),
        lambda path, overrides: load_config(path, overrides, base=launcher_settings(), schema=GenerationConfig),
        run_command,
        lambda path, overrides: dry_run(lambda: GenerationRun(config_path=path, overrides=overrides)),
    )


if __name__ == "__main__":
    sys.exit(main())
