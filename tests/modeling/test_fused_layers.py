"""Fused layers with values, adapters and shards, on a CPU: the numbers of plain layers."""

import pytest
import torch
from transformers import Qwen3Config

from tests.engines.ranks import (
    OPTIMIZER,
    SIZES,
    UNEVEN,
    assert_same,
    engine_alone,
    engine_on_rank,
    make_batch,
    make_engine,
    run_on_ranks,
    save_model,
    train,
)

CONFIG = Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=True)


@pytest.mark.parametrize(("kind", "lora"), [("value", {}), ("causal_lm", {"lora_rank": 2, "lora_alpha": 4})])
def test_critics_and_adapters_have_fused_layers_too(kind, lora, tmp_path):
    path = save_model(CONFIG, tmp_path, kind)
    output, found = "values" if kind == "value" else "log_probs", []
    for kernels in ("plain", "fused"):
        torch.manual_seed(0)
        engine, batch = make_engine(path, OPTIMIZER, kind=kind, kernels=kernels, **lora), make_batch()
        train(engine, batch, UNEVEN)
        found.append(engine.infer(batch, (output,), UNEVEN)[output])
    assert torch.allclose(*found, atol=1e-4)


@pytest.mark.parametrize("sharding", [{}, {"tensor_parallel_size": 2}, {"ulysses_sequence_parallel_size": 2}], ids=str)
def test_fused_layers_over_ranks(sharding, tmp_path):
    path = save_model(CONFIG, tmp_path)
    ranks = run_on_ranks(2, engine_on_rank, path, UNEVEN, kernels="fused", **sharding)
    assert_same(ranks, engine_alone(path), atol=1e-3)
