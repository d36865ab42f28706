"""Weights and optimizer state that wait in host memory while nothing uses them."""

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

import torch

HOST = torch.device("cpu")


@dataclass(frozen=True)
class OffloadConfig:
    """What is in host memory between the phases that use it: the weights, the optimizer's state."""

    params: bool = False
    optimizer: bool = False


class OnDevice:
    """A context in which something is on the device; it is in host memory outside of it. May be entered again inside.

    move: puts it on the device that it is given.
    """

    def __init__(self, move: Callable[[torch.device], None], device: torch.device):
        self._move = move
        self._device = device
        self._entered = 0
        move(HOST)

    def __enter__(self) -> None:
        if not self._entered:
            self._move(self._device)
        self._entered += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, stack: TracebackType | None
    ) -> None:
        self._entered -= 1
        if not self._entered:
            self._move(HOST)


def move_optimizer(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move the optimizer's state. Its step counts, a number each, stay where the optimizer put them."""
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim():
                state[name] = value.to(device)
