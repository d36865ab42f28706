"""python -m recipe.dapo.main_dapo key=value ...: DAPO, with dapo.yaml below the settings on the command line."""

import sys

from recipe.dapo.trainer import RECIPE
from verl.trainer.main_ppo import main

TRAINERS = {
    "local": ("recipe.dapo.trainer", "LocalDAPOTrainer"),
    "ray": ("recipe.dapo.ray_trainer", "RayDAPOTrainer"),
}

if __name__ == "__main__":
    sys.exit(main(trainers=TRAINERS, recipe=RECIPE, program="recipe.dapo.main_dapo"))
