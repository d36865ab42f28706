"""Sizes that vLLM and SGLang are told: the longest sequence, and the KV cache of a token."""

from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig

from verl.rollout.engine_copy import cache_bytes_per_token, max_model_len


@pytest.mark.parametrize(
    ("sizes", "ranks", "numbers"),
    [
        # keys and values of 3 layers, 4 heads of 64 / 8 numbers
        ({}, 1, 2 * 3 * 4 * 8),
        ({}, 2, 2 * 3 * 2 * 8),
        ({}, 8, 2 * 3 * 1 * 8),
        ({"head_dim": 16}, 1, 2 * 3 * 4 * 16),
        ({"num_key_value_heads": 8}, 1, 2 * 3 * 8 * 8),
    ],
)
def test_cache_bytes_per_token(sizes, ranks, numbers):
    config = LlamaConfig(
        **{"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 4, **sizes}
    )
    assert cache_bytes_per_token(config, torch.bfloat16, ranks) == 2 * numbers
    assert cache_bytes_per_token(config, torch.float32, ranks) == 4 * numbers


def test_the_longest_sequence():
    lengths = {"prompt_length": 5, "response_length": 7}
    assert max_model_len(SimpleNamespace(max_model_len=None, **lengths)) == 12
    assert max_model_len(SimpleNamespace(max_model_len=10, **lengths)) == 10
