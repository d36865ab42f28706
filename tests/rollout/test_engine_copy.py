"""Sizes that vLLM and SGLang are told: the longest sequence, and the KV cache of a token."""

from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlavaConfig

from tests.vl_models import make_config, save_vl_model
from verl.config import schema
from verl.rollout.base import RolloutEnv
from verl.rollout.checks import check_images
from verl.rollout.engine_copy import EngineCopy, cache_bytes_per_token, check_engine_kwargs, max_model_len
from verl.rollout.traits import engine_traits
from verl.trainer.checks.model_limits import ModelLimits


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


def test_models_with_images_that_are_not_supported_are_refused(tmp_path):
    env = RolloutEnv(0, 1, 0, torch.device("cpu"), 0, torch.float32)
    reason = "the tokens of an image attend to each other in both directions, .* rollout.name=native or hf"
    model = schema.ModelConfig(path=save_vl_model("gemma3", tmp_path))
    for engine in ("vllm", "sglang"):
        config, message = schema.RolloutConfig(name=engine), rf"rollout.name={engine}: .* found gemma3: {reason}"
        with pytest.raises(ValueError, match=message):
            EngineCopy.from_arguments(config, model, env, None)
        with pytest.raises(ValueError, match=message):  # before anything is started, and with --dry-run
            ModelLimits.from_config(model).check_engine(config)
        check_images(engine_traits(engine), make_config("qwen2_vl"))
        check_images(engine_traits(engine), LlamaConfig())
        with pytest.raises(ValueError, match=r"found llava: .* have not been compared .* Use rollout.name=hf"):
            check_images(engine_traits(engine), LlavaConfig())


@pytest.mark.parametrize(("name", "hint"), [("blok_size", "did you mean block_size?"), ("zzz", "remove it")])
def test_an_argument_that_the_engine_does_not_have(name, hint):
    check_engine_kwargs("vllm", {"block_size": 32}, {}, {}, ["block_size", "seed"])
    with pytest.raises(ValueError) as error:
        check_engine_kwargs("vllm", {name: 32}, {}, {}, ["block_size", "seed"])
    assert str(error.value) == f"rollout.engine_kwargs.vllm.{name}: the installed vllm has no such argument; {hint}"
    check_engine_kwargs("sglang", {name: 32}, {}, {})  # its arguments are not known
