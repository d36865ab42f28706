"""python -m verl.trainer.main_generation key=value ...: generate responses to the prompts of a file, without training.

Responses are stored while they are generated: run the same command again to resume an interrupted run.
"""

import sys

from verl.trainer.startup.program import Program, program_help
from verl.utils.lazy import lazy_names

HELP = program_help(
    """\\
      data.path=test.parquet data.prompt_key=prompt data.n_samples=8 data.batch_size=128 \\
      data.output_path=responses.parquet \\
      model.path=/path/to/model rollout.temperature=0.6 rollout.top_p=0.95 rollout.response_length=1024
""",
    "the model is loaded",
    " --of generation",
)

PROGRAM = Program(
    "verl.trainer.main_generation",
    HELP,
    "GenerationConfig",
    "verl.evaluation.generate:GenerationRun",
    "verl.evaluation.generate:execute",
)
main = PROGRAM.main

_, __getattr__, _ = lazy_names(__name__, {"verl.evaluation.generate": "GenerationRun"})

if __name__ == "__main__":
    sys.exit(main())
