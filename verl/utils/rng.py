"""RNG states that are restored on resume, and seeds derived from counters."""

import hashlib
import logging
import random
from typing import Any

import numpy as np
import torch

logger = logging.getLogger(__name__)


def seed_everything(seed: int) -> None:
    """Seed the generators of Python, numpy and torch (all devices)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # numpy takes 32 bits
    torch.manual_seed(seed)


def fork_seed(*keys: int | str) -> int:
    """Derive a seed in [0, 2^63) from its arguments only: `fork_seed(seed, "rollout", step, sample_id)`. It is the same
    on every machine and in every process, so that random numbers depend on their purpose and not on how many were drawn
    before."""
    digest = hashlib.blake2b(digest_size=8)
    for key in keys:
        if isinstance(key, str):
            text, tag = key, "s"
        elif isinstance(key, int | np.integer):
            text, tag = str(int(key)), "i"
        else:
            raise TypeError(f"fork_seed: expected int or str, found {type(key).__name__}: {key!r}")
        data = text.encode()
        digest.update(f"{tag}{len(data)}:".encode() + data)  # the length makes ("ab", "c") differ from ("a", "bc")
    return int.from_bytes(digest.digest(), "little") >> 1


def rng_state() -> dict[str, Any]:
    """The state of all generators of this process, as plain values and tensors that `torch.load(weights_only=True)`
    reads. "cuda" has one state per visible GPU; it is empty if this process has not used a GPU."""
    version, internal, gauss = random.getstate()
    algorithm, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": [version, list(internal), gauss],
        "numpy": [algorithm, keys.tolist(), position, has_gauss, cached],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore the generators to a state returned by `rng_state`. States of GPUs that this process does not have are
    skipped with a warning; sampling will then differ from the saved run."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    algorithm, keys, *rest = state["numpy"]
    np.random.set_state((algorithm, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    visible = torch.cuda.device_count()
    if len(state["cuda"]) > visible:
        logger.warning(
            "the checkpoint has RNG states of %d GPUs, this process sees %d: sampling will differ from the saved run",
            len(state["cuda"]),
            visible,
        )
    for index, saved in enumerate(state["cuda"][:visible]):
        torch.cuda.set_rng_state(saved, index)
