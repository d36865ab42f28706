"""python -m verl.trainer.fsdp_sft_trainer: an older name of `verl.trainer.sft_trainer`."""

import sys

from verl.trainer.sft_trainer import SFTTrainer, main

__all__ = ["SFTTrainer", "main"]

if __name__ == "__main__":
    sys.exit(main())
