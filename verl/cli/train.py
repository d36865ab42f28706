"""python -m verl.cli.train --config ppo_config.yaml: train with a YAML file. The same as verl.trainer.main_ppo."""

import sys

from verl.trainer.main_ppo import main

if __name__ == "__main__":
    sys.exit(main(program="verl.cli.train"))
