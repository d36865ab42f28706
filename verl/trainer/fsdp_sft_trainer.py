"""python -m verl.trainer.fsdp_sft_trainer: an older name of `verl.trainer.sft_trainer`."""

import sys

from verl.trainer import sft_trainer
from verl.trainer.sft_trainer import main

__getattr__ = sft_trainer.__getattr__

if __name__ == "__main__":
    sys.exit(main())
