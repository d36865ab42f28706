"""Parameters that are adjacent in memory, so that several projections are one matrix without a second copy."""

from collections.abc import Sequence

import torch
from torch import nn


def fuse_parameters_in_place(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    """The parameters, (n_i, ...), as one tensor (sum n_i, ...) on shared memory.

    Where they are not adjacent already, they are copied into one tensor and become views of it: the Parameter objects,
    and with them optimizers and hooks, stay. When something gives a parameter new memory later (`.to`, assigning
    .data), the next call fuses them again.
    """
    first = parameters[0].detach()
    rows = sum(p.shape[0] for p in parameters)
    if not _are_adjacent(parameters):
        # an ordinary tensor even when the caller is in inference mode: training goes on with it
        with torch.inference_mode(False), torch.no_grad():
            block = torch.cat([p.detach() for p in parameters])
            at = 0
            for p in parameters:
                p.data = block[at : at + p.shape[0]]
                at += p.shape[0]
        first = block
    return first.as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())


def _are_adjacent(parameters: Sequence[torch.Tensor]) -> bool:
    """Whether each begins in memory where the one before it ends."""
    if len(parameters) == 1:
        return parameters[0].is_contiguous()
    storage = parameters[0].untyped_storage().data_ptr()
    at = parameters[0].storage_offset()
    for p in parameters:
        if not p.is_contiguous() or p.untyped_storage().data_ptr() != storage or p.storage_offset() != at:
            return False
        at += p.numel()
    return True
