"""python -m recipe.dpo.main_dpo key=value ...: DPO, with dpo.yaml below the settings on the command line."""

import sys

from recipe.dpo.trainer import RECIPE
from verl.trainer.main_ppo import main

TRAINERS = {
    "local": ("recipe.dpo.trainer", "LocalDPOTrainer"),
    "ray": ("recipe.dpo.ray_trainer", "RayDPOTrainer"),
}

if __name__ == "__main__":
    sys.exit(main(trainers=TRAINERS, recipe=RECIPE, program="recipe.dpo.main_dpo"))
