"""python -m verl.experimental.fully_async_policy.fully_async_main key=value ...: main_ppo with its configuration.

The commands of public verl's other asynchronous trainers are this module too: one per package in `COMMANDS`.
"""

import sys

from verl.trainer.main_ppo import main_of

COMMANDS = {
    "fully_async_policy": main_of("fully_async_ppo_trainer"),
    "one_step_off_policy": main_of("one_step_off_ppo_trainer"),
    "partial_rollout": main_of("partial_rollout_trainer"),
    "async_flow": main_of("async_grpo"),
    "reward_queue": main_of("fully_async_ppo_trainer"),
}

if __name__ == "__main__":
    package = __spec__.name.split(".")[-2]  # of the published module, which `python -m` runs under its own name
    sys.exit(COMMANDS.get(package, COMMANDS["fully_async_policy"])())
