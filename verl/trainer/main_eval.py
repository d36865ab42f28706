"""python -m verl.trainer.main_eval key=value ...: evaluate the responses of a file.

Accuracy, pass@k and avg@k of every data source with bootstrap intervals, and the comparison of two models on the same
prompts; as tables on the console and as a JSON file.
"""

import sys

from verl.trainer.startup.program import Program, program_help
from verl.utils.lazy import lazy_names

HELP = program_help(
    """data.path=responses.parquet data.response_key=responses \\
      reward.custom_reward_function.path=reward.py reward.custom_reward_function.name=compute_score

  data.compare_path=other.parquet   compare with another model's responses to the same prompts""",
    "anything is scored",
    " --of evaluation",
)

PROGRAM = Program(
    "verl.trainer.main_eval", HELP, "EvalConfig", "verl.evaluation.report:Evaluation", "verl.evaluation.report:execute"
)
main = PROGRAM.main

_, __getattr__, _ = lazy_names(__name__, {"verl.evaluation.report": "Evaluation"})

if __name__ == "__main__":
    sys.exit(main())
