"""python -m verl.recipe.r1.main_eval key=value ...: verl.trainer.main_eval, under the recipe's name.

    python -m verl.recipe.r1.main_eval data.path=responses.parquet data.prompt_key=prompt data.response_key=responses \\
        custom_reward_function.path=./verl/recipe/r1/reward_score.py custom_reward_function.name=reward_func
"""

import sys

from verl.trainer.main_eval import main

if __name__ == "__main__":
    sys.exit(main())
