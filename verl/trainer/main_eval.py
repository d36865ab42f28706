"""python -m verl.trainer.main_eval key=value ...: how good are the answers of a file?

Accuracy, pass@k and avg@k of every data source with bootstrap intervals, and two models compared on the same questions;
as a table on the console and as a JSON file.
"""

import json
import logging
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from verl.checkpoints.atomic import make_folder_of, written_whole
from verl.config import check_data, load_config
from verl.config.schema.offline import EvalConfig
from verl.evaluation.report import (
    check_k,
    check_same_questions,
    compare,
    comparison_table,
    evaluate,
    figures_table,
)
from verl.evaluation.score import Question, Scorer, find_function, read_answered, score_questions
from verl.registry import import_module
from verl.rewards.outcome import RewardError
from verl.trainer.command_line import USER_ERRORS, command_line, print_error
from verl.utils.disk import DiskFullError
from verl.utils.log import console, setup_logging

logger = logging.getLogger("verl.trainer")

HELP = """usage: python -m verl.trainer.main_eval [--config FILE.yaml] key=value ...

  python -m verl.trainer.main_eval data.path=answers.parquet data.response_key=responses \\
      reward.custom_reward_function.path=reward.py reward.custom_reward_function.name=compute_score

  data.compare_path=other.parquet   answers of another model to the same prompts: the difference, and is it chance?
  --config FILE.yaml   settings from a file; keys on the command line win
  --print-config       show the settings that would be used, and stop
  --help               this text; all keys: python -m verl.cli.config --of evaluation
"""


class Evaluation:
    """Scores the answers of a file, and of another one to compare with.

    config: an EvalConfig, or None to read config_path and overrides. What is wrong with the settings, the files or the
    reward function's signature is found in the constructor.
    """

    def __init__(
        self,
        config: EvalConfig | None = None,
        *,
        config_path: str | Path | None = None,
        overrides: Sequence[str] = (),
    ):
        if config is None:
            config = load_config(config_path, overrides, schema=EvalConfig, extra_checks=[check_data])
        for address in config.imports:
            import_module(address)
        self.config = config
        self.questions = read_answered(config.data.path, config.data)
        self.compared = read_answered(config.data.compare_path, config.data) if config.data.compare_path else None
        for questions in self._both():
            check_k(questions, config.evaluation.k)
        if self.compared is not None:
            check_same_questions([q.key for q in self.questions], [q.key for q in self.compared])
        self.function = find_function(config, self.questions)
        self.scorer = Scorer(self.function, config.reward)
        path = config.evaluation.output_path
        self.output = Path(path) if path else Path(config.data.path[0]).with_suffix(".eval.json")
        make_folder_of(self.output, "evaluation.output_path")

    def _both(self) -> list[list[Question]]:
        return [self.questions] if self.compared is None else [self.questions, self.compared]

    def run(self) -> dict[str, Any]:
        """Score, print the tables and write the JSON file. Returns what that file holds.

        Raises RewardError for an answer that cannot be scored (reward.on_error=raise).
        """
        settings = self.config.evaluation
        try:
            scored = [score_questions(q, self.scorer, settings.right_from) for q in self._both()]
        finally:
            self.scorer.close()
        paths = (self.config.data.path, self.config.data.compare_path)
        report: dict[str, Any] = {"settings": self.config.model_dump(mode="json")}
        for name, files, part in zip(("evaluated", "compared_with"), paths, scored):
            evaluated = evaluate(part, settings)
            report[name] = {"files": files, **asdict(evaluated)}
            console().print(", ".join(files), markup=False, highlight=False, soft_wrap=True)
            console().print(figures_table(evaluated, settings.confidence))
        if len(scored) > 1:
            comparison = compare(*scored, settings)
            report["comparison"] = asdict(comparison)
            console().print(comparison_table(comparison, settings.confidence))
        with written_whole(self.output) as draft:
            draft.write_text(json.dumps(report, indent=1) + "\n")
        logger.info("wrote %s", self.output)
        return report


def main(arguments: list[str] | None = None) -> int:
    """Run; returns the exit status."""
    setup_logging()
    return command_line(arguments, HELP, lambda *given: load_config(*given, schema=EvalConfig), _evaluate)


def _evaluate(path: str | None, overrides: list[str]) -> int:
    try:
        evaluation = Evaluation(config_path=path, overrides=overrides)
    except USER_ERRORS as error:
        return print_error(error)
    try:
        evaluation.run()
    except RewardError as error:
        if error.__cause__ is not None:
            traceback.print_exception(error.__cause__)  # where in the user's function
        return print_error(error)
    except DiskFullError as error:
        return print_error(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
