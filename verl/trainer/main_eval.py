"""python -m verl.trainer.main_eval key=value ...: evaluate the responses of a file.

Accuracy, pass@k and avg@k of every data source with bootstrap intervals, and the comparison of two models on the same
prompts; as tables on the console and as a JSON file.
"""

import sys
from typing import TYPE_CHECKING

from verl.config import check_data, load_config
from verl.config.load import read_config
from verl.config.schema.offline import EvalConfig
from verl.trainer.startup.command_line import command_line, usage
from verl.utils.lazy import lazy_names

if TYPE_CHECKING:
    from verl.evaluation.report import Evaluation

__all__ = ["Evaluation", "main"]

HELP = """usage: {program} [--config FILE.yaml] key=value ...

  {program} data.path=responses.parquet data.response_key=responses \\
      reward.custom_reward_function.path=reward.py reward.custom_reward_function.name=compute_score

  data.compare_path=other.parquet   compare with another model's responses to the same prompts
  --config FILE.yaml   settings from a file; keys on the command line override it
  --dry-run            run all checks, print the plan, and stop before anything is scored
  --verbose            with --dry-run: list the checks
  --print-config       print the resolved configuration, and stop
  --help               this text; all keys: python -m verl.cli.config --of evaluation
"""


def main(arguments: list[str] | None = None, program: str = "verl.trainer.main_eval") -> int:
    """Run the command. Returns the exit status. `program` is the name in --help."""

    def start(path: str | None, overrides: list[str]) -> int:
        from verl.evaluation.report import run_command

        return run_command(path, overrides)

    def plan(path: str | None, overrides: list[str], verbose: bool) -> int:
        from verl.evaluation.report import Evaluation
        from verl.trainer.startup.launch import dry_run

        return dry_run(lambda: Evaluation(config_path=path, overrides=overrides), verbose)

    return command_line(
        arguments,
        usage(HELP, program),
        lambda path, overrides: load_config(path, overrides, schema=EvalConfig),
        start,
        plan,
        lambda path, overrides: read_config(path, overrides, schema=EvalConfig, extra_checks=[check_data]),
    )


__getattr__, _ = lazy_names(__name__, {"Evaluation": "verl.evaluation.report"})

if __name__ == "__main__":
    sys.exit(main())
