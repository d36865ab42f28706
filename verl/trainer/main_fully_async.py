"""python -m verl.experimental.fully_async_policy.fully_async_main key=value ...: main_ppo with its configuration."""

import sys

from verl.trainer.main_ppo import main_of

main = main_of("fully_async_ppo_trainer")

if __name__ == "__main__":
    sys.exit(main())
