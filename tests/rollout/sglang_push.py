"""A push to stand-ins for the models of SGLang's tensor-parallel ranks."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from verl.rollout.sglang import loader


def push(
    ranks: Sequence[nn.Module],
    sent: Mapping[str, torch.Tensor],
    folder: Path,
    received: Mapping[str, torch.Tensor] | None = None,
) -> list[str]:
    """Push to all ranks, one after the other. Returns what is stale.

    Args:
        ranks: the model of each rank.
        sent: weights by name.
        folder: for the outcomes; empty afterwards.
        received: what the last rank gets instead of the weights.
    """
    sums, outcome = loader.sums_of_bits(sent.items()), folder / "outcome"
    for bucket, expected, dtype in ((sent, sums, None), ({}, {}, torch.float32)):
        for rank, model in enumerate(ranks):
            given = received if bucket and received and rank == len(ranks) - 1 else bucket
            order = loader.instruction(outcome, expected, dtype)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(torch.distributed, "is_initialized", lambda: True)
                patch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
                loader.load(model, [*given.items(), (loader.INSTRUCTION, order)])
        stored = loader.read_outcomes(outcome, len(ranks))
    assert not list(folder.iterdir())
    return loader.find_stale(stored, {name: (tensor.numel(), sums[name]) for name, tensor in sent.items()})
