"""The groups of the 3D-HybridEngine, and the table of its paper, for every layout of up to 64 ranks."""

from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch

from tests.hybrid_groups import HybridGroups
from verl.config import schema
from verl.utils.shards import Box
from verl.workers.rollout.methods import rollout_env


def layouts(ranks: int):
    """(p, t, d, p_g, t_g) of up to so many ranks."""
    for p in range(1, ranks + 1):
        for t in range(1, ranks // p + 1):
            for d in {1, ranks // (p * t)}:  # replicas are copies
                for p_g in (n for n in range(1, p + 1) if p % n == 0):
                    for t_g in (n for n in range(1, t + 1) if t % n == 0):
                        yield p, t, d, p_g, t_g


def holds(groups: HybridGroups, rank: int) -> Box:
    """The training shard: pipeline stages as rows, tensor-parallel ranks as columns, of p x t equal cells."""
    stage, tensor, _ = groups.training(rank)
    return Box(stage, stage + 1, tensor, tensor + 1)


def needs(groups: HybridGroups, rank: int) -> Box:
    """The generation shard, in the same cells."""
    stage, tensor, _ = groups.generation(rank)
    stages, tensors = groups.pp // groups.generation_pp, groups.tp // groups.generation_tp
    return Box(stage * stages, (stage + 1) * stages, tensor * tensors, (tensor + 1) * tensors)


@pytest.mark.parametrize(("ranks", "least"), [(24, 300), pytest.param(64, 1000, marks=pytest.mark.slow)])
def test_every_layout_partitions_contains_and_counts_as_the_paper_says(ranks, least):
    count = 0
    for p, t, d, p_g, t_g in layouts(ranks):
        count += 1
        groups, micro_dp = HybridGroups(p, t, d, p_g, t_g), p * t // (p_g * t_g)
        sizes = {"tp": t, "pp": p, "dp": d, "generation_tp": t_g, "generation_pp": p_g, "micro_dp": micro_dp}
        micro = {}
        for kind, size in sizes.items():
            found = groups.rank_groups(kind)
            assert sorted(rank for group in found for rank in group) == list(range(p * t * d))
            assert {len(group) for group in found} == {size}
            if kind == "micro_dp":
                micro = {rank: set(group) for group in found for rank in group}
        for rank in range(p * t if d == 1 else 0):  # replicas are copies
            held, needed = holds(groups, rank), needs(groups, rank)
            assert held.intersect(needed) == held  # nothing is stored twice
            # it gathers within its micro-DP group only: the shards of these ranks are what it needs
            assert {holds(groups, other) for other in micro[rank]} == {
                Box(stage, stage + 1, tensor, tensor + 1)
                for stage in range(needed.top, needed.bottom)
                for tensor in range(needed.left, needed.right)
            }
            assert Fraction(needed.numel - 1, p * t) == Fraction(micro_dp - 1, p * t) == groups.communication
    assert count > least


def test_the_example_of_the_paper():
    strided, vanilla = HybridGroups(1, 4, 2, 1, 2), HybridGroups(1, 4, 2, 1, 2, strided=False)
    assert strided.rank_groups("tp") == vanilla.rank_groups("tp") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert strided.rank_groups("dp") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert strided.rank_groups("generation_tp") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert strided.rank_groups("micro_dp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert vanilla.rank_groups("generation_tp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    # ranks 1, 2, 5 and 6 (counted from 0) have disjoint shards in the vanilla grouping
    assert [r for r in range(8) if holds(vanilla, r).intersect(needs(vanilla, r)) is None] == [1, 2, 5, 6]
    assert [groups.communication for groups in (vanilla, strided)] == [Fraction(3, 4), Fraction(1, 4)]
    training = schema.EngineConfig(tensor_parallel_size=4)
    for engine, groups in (("native", strided), ("vllm", vanilla)):  # vLLM starts the ranks of a group by itself
        config, tp_ranks = schema.RolloutConfig(name=engine, tensor_model_parallel_size=2), {}
        for rank in range(8):
            worker = SimpleNamespace(
                rank=rank, local_rank=rank, world_size=8, rank_env=SimpleNamespace(local_world_size=8)
            )
            tp_ranks[rank] = rollout_env(worker, config, torch.device("cpu"), 0, None, training).tp_rank
        assert [[tp_ranks[rank] for rank in group] for group in groups.rank_groups("generation_tp")] == [[0, 1]] * 4


@pytest.mark.parametrize(("sizes", "text"), [((2, 4, 1, 2, 3), "tensor.* 4, found 3"), ((2, 4, 1, 4, 4), "pipeline")])
def test_generation_must_divide_training(sizes, text):
    with pytest.raises(ValueError, match=f"{text}"):
        HybridGroups(*sizes)
