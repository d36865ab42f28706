"""python -m verl.recipe.dpo.main_dpo [--online] key=value ...: learn from preferences (`verl dpo`).

Offline, the preferences are those of a file. Online, they are those of a reward between responses of the policy; the
settings are those of `verl train`, with dpo.yaml below them.
"""

import sys

from verl.trainer.startup.program import Program, program_help
from verl.utils.lazy import lazy_names

HELP = program_help(
    """\\
      dpo.loss=dpo data.train_files=pairs.jsonl data.val_files=held_out.jsonl data.train_batch_size=64 \\
      model.path=/path/to/model optim.lr=5e-7 trainer.total_epochs=1 trainer.test_freq=50

  {program} --online \\
      dpo.loss=dpo data.train_files=prompts.parquet data.train_batch_size=64 reward.reward_function=... \\
      actor_rollout_ref.model.path=/path/to/model actor_rollout_ref.rollout.n=4

A row has a prompt with the columns chosen and rejected, or (dpo.loss=kto) completion and label (docs/preferences.md).
  --online             the policy generates, a reward prefers; keys: those of verl train, and dpo.*
""",
    option=" --of dpo",
)

OFFLINE = Program("verl.recipe.dpo.main_dpo", HELP, "DPOConfig", "verl.recipe.dpo.offline:OfflineDPOTrainer")


def main(arguments: list[str] | None = None, program: str = OFFLINE.module) -> int:
    """Run `verl dpo`. Returns the exit status. arguments: None for sys.argv."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if "--online" not in arguments or {"--help", "-h"} & {*arguments}:
        return OFFLINE.main(arguments, program)
    from verl.recipe.dpo.online import DPOTrainer
    from verl.trainer.main_ppo import main as train

    return train([word for word in arguments if word != "--online"], DPOTrainer, f"{program} --online")


_, __getattr__, _ = lazy_names(__name__, {"verl.recipe.dpo.online": "DPOTrainer LocalDPOTrainer"})

if __name__ == "__main__":
    sys.exit(main())
