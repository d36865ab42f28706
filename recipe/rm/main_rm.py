"""python -m verl.recipe.rm.main_rm key=value ...: train a reward model on preference pairs (`verl rm`)."""

import sys

from verl.trainer.startup.program import Program, program_help
from verl.utils.lazy import lazy_names

HELP = program_help(
    """\\
      data.train_files=pairs.jsonl data.val_files=held_out.jsonl data.train_batch_size=64 \\
      model.path=/path/to/model optim.lr=1e-5 trainer.total_epochs=1 trainer.test_freq=50

A row has the columns chosen and rejected: whole chats or texts, or responses to the column prompt
(docs/reward_models.md).
""",
    option=" --of rm",
)

PROGRAM = Program("verl.recipe.rm.main_rm", HELP, "RMConfig", "verl.recipe.rm.trainer:RMTrainer")
main = PROGRAM.main

_, __getattr__, _ = lazy_names(__name__, {"verl.recipe.rm.trainer": "RMTrainer"})

if __name__ == "__main__":
    sys.exit(main())
