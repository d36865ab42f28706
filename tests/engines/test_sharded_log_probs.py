"""Statistics of logits whose vocabulary is sharded over ranks are those of all logits in float64."""

import os

import pytest
import torch
import torch.distributed as dist

from tests.engines.ranks import run_on_ranks
from verl.modeling.log_probs import ShardedStatistics


def on_rank(logits: torch.Tensor, targets: torch.Tensor, temperature: float, each: int) -> list[torch.Tensor]:
    """The statistics, and the gradient of this rank's entries, of which it has at most `each`."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    first = min(rank * each, logits.shape[1])
    own = logits[:, first : first + each].clone().requires_grad_()
    assert world * each >= logits.shape[1]
    found = ShardedStatistics.apply(own, targets, temperature, (True, True, True), rank * each, dist.group.WORLD)
    sum((i + 1) * values.double().sum() for i, values in enumerate(found)).backward()
    return [*(values.detach() for values in found), own.grad]


def in_float64(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> list[torch.Tensor]:
    x = logits.double().requires_grad_()
    log_p = (x / temperature).log_softmax(-1)
    found = [log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1), log_p.exp().square().sum(-1)]
    sum((i + 1) * values.sum() for i, values in enumerate(found)).backward()
    return [*(values.detach() for values in found), x.grad]


@pytest.mark.parametrize(
    ("entries", "world", "scale", "temperature", "near"),
    [
        (4000, 2, 1.0, 1.0, 2e-5),
        (4000, 2, 0.8, 0.01, 5e-4),  # logits of several hundred: half a unit in the last place is 1.5e-5
        (9, 4, 1.0, 0.7, 1e-5),  # the last rank has no entry
    ],
)
def test_ranks_together_have_the_statistics_of_all_logits(entries, world, scale, temperature, near):
    generator = torch.Generator().manual_seed(0)
    logits = scale * torch.randn(6, entries, generator=generator)
    targets = torch.randint(entries, (6,), generator=generator)
    expected = in_float64(logits, targets, temperature)
    ranks = run_on_ranks(world, on_rank, logits, targets, temperature, -(-entries // world))
    for i, wanted in enumerate(expected[:3]):
        for found in ranks:
            assert (found[i] - wanted).abs().max() < near
    gradient = torch.cat([found[3] for found in ranks], 1)
    assert (gradient - expected[3]).norm() < near * expected[3].norm()
