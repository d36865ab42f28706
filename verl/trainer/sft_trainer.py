"""python -m verl.trainer.sft_trainer key=value ...: supervised fine-tuning, configured by keys on the command line.

The class is in `verl.trainer.sft`. It is loaded at first use, so that a missing package is reported in one line.
"""

import sys

from verl.trainer.startup.program import Program, program_help
from verl.utils.lazy import lazy_names

HELP = program_help(
    """\\
      data.train_files=train.parquet data.prompt_key=question data.response_key=answer data.train_batch_size=64 \\
      model.path=/path/to/model optim.lr=1e-5 trainer.total_epochs=1 trainer.save_freq=100
""",
    option=" --of sft",
)

PROGRAM = Program("verl.trainer.sft_trainer", HELP, "SFTConfig", "verl.trainer.sft:SFTTrainer")
main = PROGRAM.main

_, __getattr__, _ = lazy_names(__name__, {"verl.trainer.sft": "SFTTrainer"})

if __name__ == "__main__":
    sys.exit(main())
