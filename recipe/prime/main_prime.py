"""python -m recipe.prime.main_prime key=value ...: PRIME, with prime.yaml below the settings on the command line."""

import sys

from recipe.prime.trainer import RECIPE
from verl.trainer.main_ppo import main

TRAINERS = {
    "local": ("recipe.prime.trainer", "LocalPRIMETrainer"),
    "ray": ("recipe.prime.ray_trainer", "RayPRIMETrainer"),
}

if __name__ == "__main__":
    sys.exit(main(trainers=TRAINERS, recipe=RECIPE, program="recipe.prime.main_prime"))
