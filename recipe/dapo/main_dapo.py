"""python -m recipe.dapo.main_dapo key=value ...: DAPO, with dapo.yaml below the settings on the command line."""

import sys
from pathlib import Path

from verl.trainer.main_ppo import main

TRAINERS = {
    "local": ("recipe.dapo.trainer", "LocalDAPOTrainer"),
    "ray": ("recipe.dapo.ray_trainer", "RayDAPOTrainer"),
}

if __name__ == "__main__":
    sys.exit(main(trainers=TRAINERS, recipe=Path(__file__).with_name("dapo.yaml")))
