"""Chooses the tokens of a micro-batch and whether to recompute activations. Plain values: the planner uses it too."""

from dataclasses import dataclass
from typing import Literal

#: tokens that saturate a GPU: larger micro-batches need more memory and are hardly faster
MAX_AUTO_TOKENS = 16384
#: tokens of an update's micro-batch on a CPU: with few, what they leave for the backward pass stays in the caches
CACHED_TOKENS = 5120
#: share of the free memory that is planned for; the rest covers fragmentation
SHARE = 0.8
#: working memory of a backward pass (gradients in flight), as a multiple of the saved activations of one layer
WORKING_LAYERS = 2


@dataclass(frozen=True)
class ActivationBytes:
    """Bytes per token saved for the backward pass, without and with activation checkpointing."""

    plain: float
    checkpointed: float

    def plus(self, other: "ActivationBytes") -> "ActivationBytes":
        return ActivationBytes(self.plain + other.plain, self.checkpointed + other.checkpointed)


def tower_activations(layers: int, hidden: int, mlp: int, patches: int, itemsize: int, stream: int) -> ActivationBytes:
    """Bytes per image token that a vision tower keeps, whose layers are those of transformers.

    Per patch, a layer keeps 11 vectors of the hidden size and 4 of the MLP size.

    Args:
        layers, hidden, mlp, patches: see `modeling.vision.tower_sizes`.
        itemsize, stream: bytes of an element of the computation, and of the residual stream.
    """
    layer = itemsize * (11 * hidden + 4 * mlp) + 4 * (stream - itemsize) * hidden
    return ActivationBytes(patches * layers * layer, patches * (layers * hidden * stream + layer))


@dataclass(frozen=True)
class TokenBudget:
    """Max tokens of a micro-batch, without and with activation checkpointing."""

    plain: int
    checkpointed: int


def token_budget(activations: ActivationBytes, free: int) -> TokenBudget:
    """The tokens that fit into `free` bytes."""
    usable = max(0, SHARE * free)
    return TokenBudget(int(usable / activations.plain), int(usable / activations.checkpointed))


def choose_micro_batching(
    tokens: int | None, longest: int, budget: TokenBudget, checkpointing: bool | Literal["auto"]
) -> tuple[int | None, bool]:
    """Choose the token budget of a micro-batch and whether to checkpoint activations.

    Args:
        tokens: tokens of the largest micro-batch if the user fixed the split, otherwise None.
        longest: tokens of the longest sequence, which is never split.
        budget: tokens that fit into the free memory.
        checkpointing: the config value; "auto" enables it if needed.

        Returns:
            (max tokens of a micro-batch, whether to checkpoint).
    """
    if checkpointing == "auto":
        # half a full micro-batch without checkpointing is as fast as a full one with it
        checkpointing = budget.plain < max(longest, tokens if tokens is not None else MAX_AUTO_TOKENS // 2)
    fits = budget.checkpointed if checkpointing else budget.plain
    return (tokens if tokens is not None else max(longest, min(MAX_AUTO_TOKENS, fits))), checkpointing
