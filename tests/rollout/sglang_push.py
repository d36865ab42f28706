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
) -> None:
    """Push to all ranks, one after the other.

    Args:
        ranks: the model of each rank.
        sent: weights by name.
        folder: for the outcomes; empty afterwards.
        received: what the last rank gets instead of the weights.
    """
    outcome = folder / "outcome"
    for rank, model in enumerate(ranks):
        weights = received if received and rank == len(ranks) - 1 else sent
        order = loader.instruction(outcome, loader.sums_of_bits(sent.items()))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.distributed, "is_initialized", lambda: True)
            patch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
            loader.load(model, [*weights.items(), (loader.INSTRUCTION, order)])
    loader.check_outcomes(outcome, len(ranks))
    assert not list(folder.iterdir())
