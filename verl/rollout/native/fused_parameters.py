"""Fuses parameters in place, so that several projections are one matrix without a second copy."""

from collections.abc import Sequence

import torch
from torch import nn


def fuse_parameters_in_place(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    """Return the parameters (n_i, ...) as one tensor (sum n_i, ...) that shares their memory.

    Unless they are adjacent already, they are copied into one tensor and become views of it. The Parameter objects do
    not change, so optimizers and hooks keep working. If a parameter gets new memory later (`.to`, assigning .data), the
    next call fuses them again.
    """
    first = parameters[0].detach()
    rows = sum(p.shape[0] for p in parameters)
    if not _are_adjacent(parameters):
        # not an inference tensor, even if the caller is in inference mode: training continues with it
        with torch.inference_mode(False), torch.no_grad():
            block = torch.cat([p.detach() for p in parameters])
            at = 0
            for p in parameters:
                p.data = block[at : at + p.shape[0]]
                at += p.shape[0]
        first = block
    return first.as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())


def _are_adjacent(parameters: Sequence[torch.Tensor]) -> bool:
    """Whether each parameter starts in memory where the previous one ends."""
    if len(parameters) == 1:
        return parameters[0].is_contiguous()
    storage = parameters[0].untyped_storage().data_ptr()
    at = parameters[0].storage_offset()
    for p in parameters:
        if not p.is_contiguous() or p.untyped_storage().data_ptr() != storage or p.storage_offset() != at:
            return False
        at += p.numel()
    return True
