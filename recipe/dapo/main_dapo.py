"""python -m recipe.dapo.main_dapo key=value ...: DAPO, with dapo.yaml below the settings on the command line."""

import sys

from recipe.dapo.trainer import LocalDAPOTrainer
from verl.trainer.main_ppo import main

if __name__ == "__main__":
    sys.exit(main(trainer=lambda: LocalDAPOTrainer))
