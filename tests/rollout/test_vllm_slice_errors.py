"""An unexpected error of one rank, while the slices that vLLM stores are looked for, is raised on every rank."""

import time
from datetime import timedelta

import pytest
import torch

from tests.engines.ranks import run_on_ranks
from tests.rollout.test_vllm_slices import Layers, on, receiver_of


def broken_loader(model, name):
    if model.rank == 1 and name == "model.norm.weight":
        raise KeyError("model.norm.weight")


def obstacle_on_rank(fault: str) -> tuple[str, str, float]:
    """For `run_on_ranks`: what `obstacle` raises, its cause, and its seconds. Rank 1 fails."""
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, start = torch.distributed.get_rank(), time.monotonic()
    if fault == "a loader":
        receiver = receiver_of(Layers(rank, broken_loader))
    else:  # at the end of the push, while the other rank finds that its parameters are no slices
        receiver = receiver_of(Layers(rank, on("model.norm.weight", lambda p: p.add_(1))))
        if rank == 1:
            receiver._engine.llm.reset_prefix_cache = lambda **keys: 1 / 0
    with pytest.raises(RuntimeError) as caught:
        receiver.obstacle()
    assert not receiver.filled
    torch.distributed.destroy_process_group()
    return str(caught.value), type(caught.value.__cause__).__name__, time.monotonic() - start


@pytest.mark.parametrize(
    ("fault", "error"), [("a loader", "KeyError: 'model.norm.weight'"), ("the engine", "ZeroDivisionError")]
)
def test_an_error_of_one_rank_is_raised_on_all_at_once(fault, error):
    """Not only where parameters are not stored as rows and columns: the others would wait for that rank."""
    (first, cause, seconds), (second, own, _) = run_on_ranks(2, obstacle_on_rank, fault)
    assert first == second and "found an error on rank 1: " + error in first and "weight_sync=replica" in first
    assert (cause, own) == ("NoneType", error.partition(":")[0]) and seconds < 20
