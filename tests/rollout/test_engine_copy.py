"""What vLLM and SGLang have in common: sizes, arguments that are refused, what the installed package must have."""

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlavaConfig

from tests.vl_models import make_config, save_vl_model
from verl.config import schema
from verl.rollout import external
from verl.rollout.base import RolloutEnv, make_rollout_engine
from verl.rollout.checks import check_images
from verl.rollout.engine_copy import EngineCopy, EngineJob, EngineReceiver
from verl.rollout.external import cache_bytes_per_token, check_engine_kwargs
from verl.rollout.request import Request, SamplingParams
from verl.rollout.sglang import settings as sglang_settings
from verl.rollout.traits import engine_traits
from verl.rollout.vllm import settings as vllm_settings
from verl.trainer.checks.models import ModelLimits

ENGINES = ("vllm", "sglang")
SETTINGS = {"vllm": vllm_settings, "sglang": sglang_settings}


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
    for given, expected in ((None, 12), (10, 10)):
        config = schema.RolloutConfig(max_model_len=given, **lengths)
        assert EngineCopy(config, None, None, None, is_trained=True).max_length == expected


@pytest.mark.parametrize(
    ("engine", "kind", "message"),
    [
        (
            "vllm",
            "gemma3",
            "found gemma3: the tokens of an image attend to each other in both directions, .*native or hf",
        ),
        ("vllm", "llava", "found llava: .* have not been compared .* Use rollout.name=hf"),
        ("sglang", "qwen2_vl", "expected a model without images, found qwen2_vl: use rollout.name=native, vllm or hf"),
    ],
)
def test_models_with_images_that_are_not_supported_are_refused(engine, kind, message):
    with pytest.raises(ValueError, match=rf"rollout.name={engine}: .*{message}"):
        check_images(engine_traits(engine), LlavaConfig() if kind == "llava" else make_config(kind))
    check_images(engine_traits(engine), LlamaConfig())
    check_images(engine_traits("vllm"), make_config("qwen2_vl"))


def test_they_are_refused_before_anything_is_started(tmp_path):
    env, message = RolloutEnv(0, 1, 0, torch.device("cpu"), 0, torch.float32), "rollout.name=vllm: .* found gemma3: "
    model, config = schema.ModelConfig(path=save_vl_model("gemma3", tmp_path)), schema.RolloutConfig(name="vllm")
    with pytest.raises(ValueError, match=message):
        EngineCopy.from_arguments(config, model, env, None)
    with pytest.raises(ValueError, match=message):  # with --dry-run, too
        ModelLimits.from_config(model).check_engine(config)


@pytest.mark.parametrize(("name", "hint"), [("blok_size", "did you mean block_size?"), ("zzz", "remove it")])
def test_an_argument_that_the_engine_does_not_have(name, hint):
    check_engine_kwargs("vllm", {"block_size": 32}, {}, {}, ["block_size", "seed"])
    with pytest.raises(ValueError) as error:
        check_engine_kwargs("vllm", {name: 32}, {}, {}, ["block_size", "seed"])
    assert str(error.value) == f"rollout.engine_kwargs.vllm.{name}: the installed vllm has no such argument; {hint}"
    check_engine_kwargs("sglang", {name: 32}, {}, {})  # its arguments are not known


REFUSED = [
    ("vllm", {"logprobs_mode": "raw_logprobs"}, "is not supported: log-probs are those of the distribution"),
    ("vllm", {"max_model_len": 5}, r"set rollout\.max_model_len instead"),
    ("vllm", {"moe_backend": "flashinfer_cutlass"}, "is not supported: weights of experts are loaded in"),
    ("sglang", {"context_length": 5}, r"set rollout\.max_model_len instead"),
    ("sglang", {"skip_tokenizer_init": False}, "is not supported: prompts and responses are token ids"),
    ("sglang", {"pp_size": 2}, r"is not supported: use rollout\.tensor_model_parallel_size"),
    ("sglang", {"moe_runner_backend": "cutlass"}, "is not supported: weights of experts are loaded in"),
    *(
        (engine, *row)
        for engine in ENGINES
        for row in (
            ({"quantization": "fp8"}, "is not supported: trained weights cannot be loaded"),
            ({"enable_lora": True}, "is not supported: adapters are merged into the weights of every push"),
            ({"max_lora_rank": 8}, "is not supported: adapters are merged into the weights of every push"),
            ({"enable_eplb": True}, "is not supported: trained weights are loaded into one copy"),
            ({"enable_return_routed_experts": True}, r"set rollout\.enable_rollout_routing_replay instead"),
        )
    ),
]


@pytest.mark.parametrize(("engine", "given", "message"), REFUSED)
def test_arguments_that_contradict_another_key(engine, given, message):
    with pytest.raises(ValueError, match=rf"rollout\.engine_kwargs\.{engine}\.{next(iter(given))}:? {message}"):
        SETTINGS[engine].check_kwargs(given)
    SETTINGS[engine].check_kwargs({"block_size": 32, "attention_backend": "triton"})


@pytest.mark.parametrize("engine", ENGINES)
def test_deterministic_needs_native(engine):
    env = RolloutEnv(0, 1, 0, torch.device("cpu"), 0, torch.float32)
    config = schema.RolloutConfig(name=engine, deterministic=True)
    with pytest.raises(ValueError, match=r"rollout\.deterministic needs .* set rollout\.name=native"):
        make_rollout_engine(engine, config, schema.ModelConfig(path="none"), env)


def test_the_versions_of_a_completion_are_those_of_a_response_with_several():
    for versions, spans in (([], []), ([(0, 4)], []), ([(0, 4), (1, 5)], [(0, 4), (1, 5)])):
        job = EngineJob(Request([1, 2], SamplingParams(2, ()), 0), token_ids=[3, 4], log_probs=[-1.0, -2.0])
        job.versions = versions
        assert job.completion("length").weight_versions == spans


def test_weights_that_were_released_are_not_used():
    """The part of a receiver that needs no engine."""
    requests = SimpleNamespace(exclusive=lambda caller, idle: nullcontext())
    receiver = EngineReceiver(requests, SimpleNamespace(drop=lambda: None), dict, filled=True)
    receiver.check_filled()
    receiver.release()
    with pytest.raises(ValueError, match="no weights: push them first"):
        receiver.check_filled()


@pytest.mark.parametrize(
    ("engine", "free", "shares", "found"),
    [
        ("vllm", 30, {0.3: 0.3, 0.5: 0.33}, "vLLM gets 27.0 GiB"),  # 0.9 of 30 / 80
        ("sglang", 40, {0.3: 0.6, 0.5: 0.9}, "SGLang gets 36.0 GiB"),  # of what is free
    ],
)
def test_the_engine_gets_at_most_the_free_memory(engine, free, shares, found, monkeypatch):
    warnings = []  # SGLang removes the handlers of the root logger, so caplog sees nothing after an engine has started
    monkeypatch.setattr(external.log, "warning", lambda text, *values: warnings.append(text % values))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free * 2**30, 80 * 2**30))
    for asked, share in shares.items():
        assert not warnings and SETTINGS[engine].memory_share(asked, torch.device("cuda", 0)) == share
    assert f"only {free}.0 of 80.0 GiB are free on cuda:0, so {found}" in warnings[0]


@pytest.mark.parametrize(
    ("probe", "message"),
    [
        (vllm_settings.known_arguments, r"'vllm' needs vLLM 0\.24\.0 or newer, found 0\.23\.9 \(tested: vllm 0\.24\.0"),
        (partial(sglang_settings.probe, on_gpu=True), r"'sglang' needs SGLang 0\.5\.15 or newer, found 0\.5\.9 \("),
    ],
)
def test_an_old_version_is_refused_with_the_tested_ones(probe, message, monkeypatch):
    monkeypatch.setattr("verl.utils.packages.is_installed", lambda module: True)
    versions = {"vllm": "0.23.9", "sglang": "0.5.9"}
    monkeypatch.setattr("verl.utils.packages.version_of", lambda name, *others: versions[name])
    monkeypatch.setattr(vllm_settings, "set_environment", lambda: None)
    with pytest.raises(ImportError, match=message):
        probe()
