"""python -m verl.experimental.one_step_off_policy.main_ppo key=value ...: main_ppo with its configuration."""

import sys

from verl.trainer.main_ppo import main_of

main = main_of("one_step_off_ppo_trainer")

if __name__ == "__main__":
    sys.exit(main())
