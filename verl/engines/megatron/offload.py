"""Offloading of a `MegatronEngine`: weights, gradients and optimizer state in host memory between phases.

megatron-core keeps views of its buffers, so storages are emptied and filled again in place.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch


class Storages:
    """Storages that are in host memory every other time.

    Args:
        tensors: returns the tensors; a storage that several share is moved once.
        keep: keep the values; gradients, which are set to zero before they are used, are dropped.
    """

    def __init__(self, tensors: Callable[[], Iterable[torch.Tensor]], keep: bool = True):
        self._tensors, self._keep = tensors, keep
        self._left: list[tuple[torch.UntypedStorage, int, torch.UntypedStorage | None]] | None = None

    def move(self, _: torch.device) -> None:
        """Leave the device, or return to it. `OnDevice` calls it in turn."""
        if self._left is not None:
            for storage, size, host in self._left:
                storage.resize_(size)
                if host is not None:
                    storage.copy_(host)
            self._left = None
            return
        self._left = []
        found = {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in self._tensors())}
        for storage in found.values():
            size, host = storage.nbytes(), None
            if self._keep:
                pinned = torch.empty(size, dtype=torch.uint8, pin_memory=storage.device.type == "cuda")
                host = pinned.untyped_storage()
                host.copy_(storage)
            storage.resize_(0)
            self._left.append((storage, size, host))


def optimizer_tensors(optimizer: Any, weights: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Optimizer state and float32 weights, without what shares memory with the weights."""
    shared = {weight.untyped_storage()._cdata for weight in weights}
    found = []
    for one in optimizer.chained_optimizers:
        if one.optimizer is not None:
            found += [p for group in one.optimizer.param_groups for p in group["params"]]
            values = [value for state in one.optimizer.state.values() for value in state.values()]
            found += [value for value in values if isinstance(value, torch.Tensor) and value.dim()]
    return [tensor for tensor in found if tensor.untyped_storage()._cdata not in shared]
