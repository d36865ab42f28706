"""Sequence parallelism on real processes: loss, gradient and outputs of one device, whatever the heads."""

import pytest
import torch
from transformers import Gemma2Config

from tests.engines.ranks import (
    FLOAT64,
    OPTIMIZER,
    SIZES,
    assert_same,
    engine_alone,
    engine_on_rank,
    make_engine,
    qwen2,
    run_on_ranks,
    save_model,
)
from verl.engines.base import MicroBatching
from verl.modeling.sequence_parallel import SequenceRanks

GEMMA2 = Gemma2Config(  # soft-capped scores, and a window in every other layer
    **SIZES, head_dim=8, sliding_window=4, query_pre_attn_scalar=8
)
MODELS = {"2 of 4 heads": qwen2(4, 2), "1 of 4 heads": qwen2(4, 1), "3 of 6 heads": qwen2(6, 3), "gemma2": GEMMA2}
MODELS["3 of 6 heads"].hidden_size = 48


@pytest.mark.parametrize(
    ("model", "kind", "world", "micro"),
    [
        ("2 of 4 heads", "causal_lm", 2, MicroBatching(tokens=9)),
        ("1 of 4 heads", "value", 2, MicroBatching(rows=3)),  # fewer key/value heads than ranks
        ("3 of 6 heads", "causal_lm", 2, MicroBatching(rows=1)),  # key/value heads that the ranks do not divide
        ("gemma2", "causal_lm", 2, MicroBatching()),
        pytest.param("2 of 4 heads", "causal_lm", 4, MicroBatching(tokens=9), marks=pytest.mark.slow),
        pytest.param("1 of 4 heads", "value", 4, MicroBatching(rows=1), marks=pytest.mark.slow),
    ],
)
def test_ranks_that_share_tokens_give_the_numbers_of_one_device(model, kind, world, micro, tmp_path):
    path = save_model(MODELS[model], tmp_path, kind)
    sharding = {"ulysses_sequence_parallel_size": world}
    ranks = run_on_ranks(world, engine_on_rank, path, micro, kind=kind, **sharding, **FLOAT64)
    assert_same(ranks, engine_alone(path, kind=kind, **FLOAT64), atol=1e-9)


def two_groups(path: str) -> dict:
    """Four ranks: two groups of two."""
    engine = make_engine(path, OPTIMIZER, sharded=True, ulysses_sequence_parallel_size=2)
    counted = engine.sum_over_ranks([float(engine.dp_rank + 1)])
    return {"layout": (engine.dp_rank, engine.model_parallel_rank, engine.dp_size), "counted": counted}


@pytest.mark.slow
def test_groups_of_ranks_share_rows_and_count_them_once(tmp_path):
    path = save_model(qwen2(), tmp_path)
    found = run_on_ranks(4, two_groups, path)
    assert [rank["layout"] for rank in found] == [(0, 0, 2), (0, 1, 2), (1, 0, 2), (1, 1, 2)]
    assert all(rank["counted"] == [3.0] for rank in found)
    sharding = {"fsdp_size": 2, "ulysses_sequence_parallel_size": 2}
    ranks = run_on_ranks(4, engine_on_rank, path, MicroBatching(tokens=9), **sharding, **FLOAT64)
    assert_same(ranks, engine_alone(path, **FLOAT64), atol=1e-9)


def test_heads_that_the_ranks_cannot_share_are_refused():
    ranks = SequenceRanks(group=None, rank=0, size=4)
    with pytest.raises(ValueError, match="ulysses_sequence_parallel_size 4 does not divide the model's 6 attention"):
        ranks.check_heads(6)


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(8, 2, 4), (6, 3, 2), (12, 6, 4), (4, 4, 2), (18, 3, 2)])
def test_repeated_heads_are_those_that_each_query_head_read(heads, kv_heads, size):
    """Rank r has query heads r*H/size ...; the heads that it then pairs with are the ones of the whole model."""
    key = torch.arange(kv_heads, dtype=torch.float32).view(1, kv_heads, 1, 1)
    repeated = SequenceRanks(None, 0, size).repeat_heads(key, heads).flatten().tolist()
    assert len(repeated) % size == 0 and heads % len(repeated) == 0
    for rank in range(size):
        own = repeated[rank * len(repeated) // size : (rank + 1) * len(repeated) // size]
        for i in range(heads // size):
            whole = rank * heads // size + i
            assert own[i // (heads // size // len(own))] == whole // (heads // kv_heads)
