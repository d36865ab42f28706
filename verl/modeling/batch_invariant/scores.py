"""The scores of attention, shared by the CPU functions and the Triton kernels."""

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Scores:
    """How attention scores are computed.

    Attributes:
        scale: score = scale * (q k).
        window: a query attends to the last `window` keys; None: to all.
        softcap: score = softcap * tanh(score / softcap) if given.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None


#: attention of one layer: (index of the layer, query (N, HQ, D), key (N, HK, D),
#: value (N, HK, D), scores) -> (N, HQ, D)
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, Scores], torch.Tensor]
