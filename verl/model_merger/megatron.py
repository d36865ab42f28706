"""Checkpoints of Megatron-core: not yet."""

from pathlib import Path
from typing import NoReturn


def open_checkpoint(folder: Path, base: str | None = None) -> NoReturn:
    """Raises ValueError: this project has no Megatron engine yet, so its merger has nothing to read such files by."""
    raise ValueError(
        f"--backend megatron cannot be merged yet ({folder}): the Megatron engine is not part of this release. "
        "Checkpoints of FSDP, and of one device, merge with --backend fsdp"
    )
