"""Weights of strategy=megatron move to the slices of a tensor-parallel rollout: values, bytes and sources."""

import pytest
import torch

from tests.engines.megatron_cpu import skip_reason

if reason := skip_reason():
    pytest.skip(reason, allow_module_level=True)

from transformers import AutoModelForCausalLM

from tests.engines.megatron_cpu.ranks import MODELS, megatron_engine, reshard_on_rank
from tests.engines.ranks import run_on_ranks, save_model
from tests.hybrid_groups import HybridGroups


def overlap(count: int, a: tuple[int, int], b: tuple[int, int]) -> float:
    """The share of `count` equal units that two ranks, given as (rank, size), both have."""
    (i, m), (j, n) = a, b
    return max(0.0, min((i + 1) / m, (j + 1) / n) - max(i / m, j / n)) if count else 0.0


def expected_bytes(config, groups: HybridGroups, rank: int, e: int, et: int) -> tuple[int, int, int]:
    """(received, kept, all) bytes of a rank, counted tensor by tensor from the sizes of the model, in float32."""
    stage, _, _ = groups.training(rank)
    generates = groups.generation(rank)[1], groups.generation_tp
    inside = rank % (groups.dp * groups.tp)  # of the stage
    lacks = has = total = 0.0
    for name, p in AutoModelForCausalLM.from_config(config).named_parameters():
        layer = name.split(".")[-2] if name.endswith(("weight", "bias")) else "experts"
        size, stages = 4 * p.numel(), {0}
        if ".layers." in name:
            stages = {int(name.split(".")[2]) * groups.pp // config.num_hidden_layers}
        elif layer == "embed_tokens" and config.tie_word_embeddings:
            stages = {0, groups.pp - 1}
        elif layer != "embed_tokens":
            stages = {groups.pp - 1}
        if layer == "experts":
            needed = 1 / groups.generation_tp
            held = overlap(p.shape[0], (inside // et % e, e), generates) / et
        elif "norm" in layer or layer == "gate":  # of the router
            needed = held = 1.0
        else:
            needed, held = 1 / groups.generation_tp, 1 / groups.tp
        held = held if stage in stages else 0.0
        lacks, has, total = lacks + size * (needed - held), has + size * held, total + size
    return round(lacks), round(has), round(total)


@pytest.mark.parametrize(
    ("model", "sizes", "t_g", "keys"),
    [
        ("llama", (1, 2, 1), 2, {}),  # (p, t, d) -> t_g
        ("qwen2", (1, 2, 1), 1, {}),
        pytest.param("deep", (2, 1, 1), 1, {}, marks=pytest.mark.slow),
        pytest.param("deep", (2, 1, 1), 1, {"v": 2}, marks=pytest.mark.slow),
        pytest.param("mixtral", (1, 2, 1), 2, {"e": 2, "et": 1}, marks=pytest.mark.slow),
        pytest.param("mixtral", (1, 2, 1), 1, {"et": 2}, marks=pytest.mark.slow),
        pytest.param("wide", (1, 4, 1), 2, {}, marks=pytest.mark.slow),
        pytest.param("deep", (2, 2, 1), 2, {}, marks=pytest.mark.slow),
        pytest.param("deep", (2, 2, 1), 1, {"v": 2}, marks=pytest.mark.slow),
        pytest.param("deep", (2, 1, 2), 1, {}, marks=pytest.mark.slow),
        pytest.param("llama", (1, 2, 2), 2, {"c": 2, "param_offload": True}, marks=pytest.mark.slow),
        pytest.param("mixtral", (1, 2, 2), 2, {"e": 2}, marks=pytest.mark.slow),
        pytest.param("mixtral", (1, 2, 2), 2, {"e": 4, "et": 1}, marks=pytest.mark.slow),
        pytest.param("mixtral", (1, 2, 2), 1, {"e": 2, "et": 1}, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", (2, 1, 2), 1, {"e": 2}, marks=pytest.mark.slow),
        pytest.param("deep", (2, 2, 2), 2, {}, marks=pytest.mark.slow),
        pytest.param("deep", (2, 2, 2), 1, {}, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", (2, 2, 2), 2, {"e": 2}, marks=pytest.mark.slow),
    ],
)
def test_every_rank_gets_its_slices_and_only_what_it_lacks(model, sizes, t_g, keys, tmp_path):
    """After an update. What is stored is bit for bit what a push of the gathered weights stores."""
    (p, t, d), config = sizes, MODELS[model]
    groups = HybridGroups(p, t, d, 1, t_g)
    ranks = run_on_ranks(p * t * d, reshard_on_rank, save_model(config, tmp_path), groups, t=t, p=p, **keys)
    e, et = keys.get("e", 1), keys.get("et", t)
    for rank, found in enumerate(ranks):
        lacks, has, total = expected_bytes(config, groups, rank, e, et)
        assert found["differs"] == [] and found["parameters"] > 10
        assert (found["received"], found["kept"]) == (lacks, has)
        assert found["counted"] == lacks  # by the collective
        assert found["checksum"] == ranks[0]["checksum"]
        if e == 1:  # experts of other ranks may be in another replica
            (own,) = (group for group in groups.rank_groups("micro_dp") if rank in group)
            assert set(found["sources"]) <= set(own) - {rank}
        if p == e == 1:  # the formula of the paper, of what is not on every rank
            replicated = sum(4 * x.numel() for n, x in named(config) if "norm" in n or n.endswith("gate.weight"))
            assert lacks == (total - replicated) * groups.communication


def named(config):
    return AutoModelForCausalLM.from_config(config).named_parameters()


def test_a_vocabulary_with_padding_and_empty_shards(tmp_path):
    """33 entries on two ranks are 17 and 16."""
    path = save_model(MODELS["qwen3"], tmp_path)
    ranks = run_on_ranks(2, reshard_on_rank, path, HybridGroups(1, 2, 1, 1, 1), t=2)
    assert all(found["differs"] == [] for found in ranks)
    # half of the matrices, but one row more or less of the embedding
    assert ranks[1]["received"] - ranks[0]["received"] == 4 * MODELS["qwen3"].hidden_size


def test_shards_of_one_rank_are_its_weights(tmp_path):
    engine = megatron_engine(save_model(MODELS["mixtral"], tmp_path))
    full = dict(engine.weights())
    layout, shards = engine.shard_layout(), list(engine.shards())
    assert layout is engine.shard_layout() and len(layout) == len(shards)
    assert {shard.name for shard in layout} == set(full)
    for shard, values in zip(layout, shards):
        if values.shape == full[shard.name].shape:
            assert torch.equal(values, full[shard.name]), shard.name
