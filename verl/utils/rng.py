"""Random numbers that a resumed run draws again: every generator's state, and seeds derived by counter."""

import hashlib
import logging
import random
from typing import Any

import numpy as np
import torch

logger = logging.getLogger(__name__)


def seed_everything(seed: int) -> None:
    """Seed the generators of Python, numpy, and torch on every device."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # numpy takes 32 bits
    torch.manual_seed(seed)


def fork_seed(*parts: int | str) -> int:
    """A seed in [0, 2^63) that depends on the parts alone: `fork_seed(seed, "rollout", step, row)`.

    The same parts give the same seed on every machine and in every process, and other parts an unrelated one,
    so a draw can depend on what it is for and not on how many draws came before it.
    """
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        if isinstance(part, str):
            text, tag = part, "s"
        elif isinstance(part, int | np.integer):
            text, tag = str(int(part)), "i"
        else:
            raise TypeError(f"a seed is made of int and str, found {type(part).__name__}: {part!r}")
        data = text.encode()
        digest.update(f"{tag}{len(data)}:".encode() + data)  # with its length, ("ab", "c") differs from ("a", "bc")
    return int.from_bytes(digest.digest(), "little") >> 1


def rng_state() -> dict[str, Any]:
    """The state of every generator of this process.

    Made of plain values and tensors, so that `torch.load(weights_only=True)` reads it. "cuda" holds one state per
    visible GPU; it is empty when this process has not used a GPU.
    """
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": [version, list(words), gauss],
        "numpy": [kind, keys.tolist(), position, has_gauss, cached],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Put every generator back to what `rng_state` returned.

    States of GPUs that this process does not have are left out with a warning: the run goes on, but draws on a GPU
    will differ from those of the run that was saved.
    """
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    visible = torch.cuda.device_count()
    if len(state["cuda"]) > visible:
        logger.warning(
            "the random states of %d GPUs were saved and this process sees %d: sampling will not repeat the saved run",
            len(state["cuda"]),
            visible,
        )
    for index, saved in enumerate(state["cuda"][:visible]):
        torch.cuda.set_rng_state(saved, index)
