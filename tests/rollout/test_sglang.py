"""The SGLang adapter: the loader, filters and settings, and with SGLang a push and training.

Tests of `real` need SGLang: make test-sglang. Their device, dtype and arguments are those of the contract test
(`tests.rollout.contract`); on a GPU VERL_CONTRACT_DTYPE=bf16 is needed.
"""

import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.rollout.asynchronous_runs import grpo_reports
from tests.rollout.contract import DEVICE, DTYPE, IS_FLOAT32, KWARGS, SHAPE, rounding
from tests.rollout.mixtures import MIXTURES, check_experts, check_mixture, save_mixture
from tests.trainer.conftest import make_tiny, run_settings
from verl.config import load_config, schema
from verl.config.checks.run import check_built_in
from verl.config.errors import ConfigError
from verl.rollout.base import RolloutEnv, make_rollout_engine
from verl.rollout.engine_copy import EngineCopy
from verl.rollout.external import OWNED
from verl.rollout.request import Request, SamplingParams, make_requests
from verl.rollout.sampling import filter_logits
from verl.rollout.sglang import loader, settings, weights
from verl.rollout.sglang.engine import LogitFilter, filter_params
from verl.utils.device import resolve_device

IS_INSTALLED = importlib.util.find_spec("sglang") is not None
ACTOR = "actor_rollout_ref.actor.fsdp_config"
real = pytest.mark.skipif(not IS_INSTALLED, reason="SGLang is not installed: make test-sglang")
ENV = RolloutEnv(0, 1, 0, torch.device("cpu"), 0, torch.float32)
ABLE = settings.Capabilities(update_sessions=True, routed_experts=True)


# ---- in the scheduler -----------------------------------------------------------------------------------------------


def test_filters_exclude_what_native_excludes():
    torch.manual_seed(0)
    logits = torch.randn(6, 50) * 3
    rows = [SamplingParams(1, (), temperature=0.7, top_p=0.8), SamplingParams(1, (), top_k=5, min_p=0.1)] * 3
    found = LogitFilter()(logits.clone(), [filter_params(params) for params in rows])
    for row, params in enumerate(rows):
        expected = filter_logits(logits[row : row + 1], params)[0]
        kept = ~expected.isneginf()
        assert torch.equal(found[row].isneginf(), ~kept) and torch.equal(found[row][kept], logits[row][kept])
        assert 0 < kept.sum() < 50


class Rank(torch.nn.Module):
    """Stands in for SGLang's model on one rank: its loader ignores names that it does not know."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ParameterDict({"embed": torch.zeros(5, 3), "norm": torch.zeros(3)})

    @torch.no_grad()
    def load_weights(self, named):
        for name, tensor in named:
            if name in self.layers:
                self.layers[name].copy_(tensor)


def push(ranks: list[Rank], sent: dict[str, torch.Tensor], folder: Path, received=None) -> None:
    """Push to all ranks, one after the other. received: what the last rank gets instead of the weights."""
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


SENT = {"embed": torch.arange(15.0).view(5, 3), "norm": torch.ones(3)}


def test_an_error_of_the_loader_is_raised_in_the_trainer(tmp_path):
    with pytest.raises(ValueError, match=r"SGLang's rank 0 cannot load the weights: RuntimeError: The size of tensor"):
        push([Rank()], SENT | {"norm": torch.zeros(2)}, tmp_path)
    with pytest.raises(ValueError, match="SGLang's rank 1 did not load the weights"):
        (tmp_path / "outcome-0").write_text('{"error": ""}')
        loader.check_outcomes(tmp_path / "outcome", 2)


def test_bits_that_change_on_their_way_to_one_rank_are_found_there(tmp_path):
    changed = SENT["embed"].clone()
    changed.view(torch.int32)[3, 1] ^= 1
    ranks, message = [Rank(), Rank()], "expected the bits that were sent, found others in 1 of 2 tensors, first "
    with pytest.raises(ValueError, match=rf"SGLang's rank 1 cannot load .*: {message}\['embed'\]"):
        push(ranks, SENT, tmp_path, SENT | {"embed": changed})
    # nothing of the bucket was loaded
    assert not ranks[1].layers["norm"].any() and torch.equal(ranks[0].layers["embed"], SENT["embed"])
    with pytest.raises(ValueError, match=rf"{message}\['norm'\]"):
        push(ranks, SENT, tmp_path, {"embed": SENT["embed"]})


# ---- settings -------------------------------------------------------------------------------------------------------


def test_a_misspelt_argument_is_refused_with_the_nearest_one():
    able = replace(ABLE, arguments=frozenset({"attention_backend", "page_size"}))
    copy = pushed(engine_kwargs=schema.EngineKwargs(sglang={"atention_backend": "x"}))
    with pytest.raises(ValueError) as error:
        settings.engine_args(copy, ENV, able)
    assert str(error.value) == (
        "rollout.engine_kwargs.sglang.atention_backend: the installed sglang has no such argument; did you mean "
        "attention_backend?"
    )


def test_log_probs_before_the_temperature_are_refused(monkeypatch):
    monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", "1")
    with pytest.raises(ValueError, match=r"SGLANG_RETURN_ORIGINAL_LOGPROB is set: .* unset it"):
        settings.check_kwargs({})


def pushed(**keys) -> EngineCopy:
    """keys: of the `rollout` section."""
    from transformers import LlamaConfig

    config = schema.RolloutConfig(name="sglang", **keys)
    hf_config = LlamaConfig(hidden_size=64, num_attention_heads=2, num_hidden_layers=2, max_position_embeddings=100)
    return EngineCopy(config, schema.ModelConfig(path="m"), hf_config, torch.float32, is_trained=True)


def test_keys_of_the_rollout_section_are_arguments_of_sglang(monkeypatch):
    monkeypatch.delenv("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", raising=False)
    kwargs = schema.EngineKwargs(sglang={"page_size": 1})
    copy = pushed(
        prompt_length=40, response_length=60, max_num_seqs=7, enable_prefix_caching=False, max_num_batched_tokens=33,
        engine_kwargs=kwargs,
    )  # fmt: skip
    found = settings.engine_args(copy, ENV, ABLE)
    expected = {"context_length": 108, "max_running_requests": 7, "disable_radix_cache": True, "dtype": "float32"}
    expected |= {"chunked_prefill_size": 33, "load_format": "dummy", "page_size": 1, "tp_size": 1}
    assert {key: found[key] for key in expected} == expected
    assert os.environ["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] == "1"
    other = RolloutEnv(1, 2, 1, torch.device("cpu"), 0)
    others = settings.engine_args(replace(copy, is_trained=False), other, ABLE)
    assert others["random_seed"] != found["random_seed"] and others["load_format"] == "auto"


def test_float32_is_refused_on_a_gpu_before_the_engine_starts():
    env = replace(ENV, device=torch.device("cuda", 0))
    with pytest.raises(ValueError, match=r"cuda:0: expected weights in bf16 .* fp32: .* set rollout\.dtype=bf16"):
        settings.engine_args(pushed(), env, ABLE)
    for dtype, device in ((torch.bfloat16, "cuda"), (torch.float16, "cuda"), (torch.float32, "cpu")):
        settings.check_dtype(dtype, torch.device(device))


def test_arguments_for_a_mixture_of_experts(monkeypatch):
    from transformers import MixtralConfig

    monkeypatch.setattr(settings, "memory_share", lambda asked, device: asked)
    mixture = MixtralConfig(hidden_size=64, num_attention_heads=2, num_hidden_layers=2, max_position_embeddings=100)
    keys = {"hf_config": mixture, "dtype": torch.bfloat16}
    made = replace(pushed(enable_rollout_routing_replay=True), **keys)
    on_gpu = replace(ENV, device=torch.device("cuda", 0))
    found = settings.engine_args(made, on_gpu, ABLE)
    assert found["moe_runner_backend"] == "triton" and found["enable_return_routed_experts"] is True
    assert found["chunked_prefill_size"] == made.config.max_num_batched_tokens == 8192
    whole = replace(pushed(enable_rollout_routing_replay=True, enable_chunked_prefill=False), **keys)
    whole = settings.engine_args(whole, on_gpu, ABLE)
    assert whole["chunked_prefill_size"] == whole["max_prefill_tokens"] + whole["context_length"] == 8192 + 1032
    dense = settings.engine_args(replace(pushed(), dtype=torch.bfloat16), on_gpu, ABLE)
    assert not {"moe_runner_backend", "enable_return_routed_experts"} & dense.keys()
    with pytest.raises(ValueError, match=r"engine 'sglang' does not report the experts .*native, or"):
        settings.engine_args(made, on_gpu, replace(ABLE, routed_experts=False))
    mixture.tie_word_embeddings = True
    with pytest.raises(ValueError, match=r"mixtral with tie_word_embeddings=true: .* separate output layer"):
        settings.engine_args(made, on_gpu, ABLE)


@pytest.mark.parametrize("given", [{"cuda_graph_backend_prefill": "tc_piecewise"}, {"enable_torch_compile": True}])
def test_arguments_that_capture_graphs_contradict_enforce_eager(given):
    kwargs = schema.EngineKwargs(sglang=given)
    assert settings.engine_args(pushed(engine_kwargs=kwargs), ENV, ABLE).items() >= given.items()
    with pytest.raises(ValueError, match=rf"{next(iter(given))} contradicts rollout\.enforce_eager=true"):
        settings.engine_args(pushed(engine_kwargs=kwargs, enforce_eager=True), ENV, ABLE)


@pytest.mark.skipif(IS_INSTALLED, reason="SGLang is installed")
@pytest.mark.parametrize("key", ["actor_rollout_ref.rollout.name", "engine.actor_type"])
def test_one_message_where_it_is_not_installed(key):
    with pytest.raises(ConfigError, match=r"'sglang' needs SGLang, which is not installed \(tested: 0\.5\.15"):
        load_config(overrides=[f"{key}=sglang"], extra_checks=[check_built_in])
    with pytest.raises(ImportError, match=r"'sglang' needs SGLang, which is not installed"):
        make_rollout_engine("sglang", schema.RolloutConfig(name="sglang"), schema.ModelConfig(path="none"), ENV)


def test_the_other_ranks_of_a_group_only_gather():
    env = RolloutEnv(1, 2, 1, torch.device("cpu"), 0, torch.float32, tp_rank=1, tp_size=2)
    follower = make_rollout_engine("sglang", schema.RolloutConfig(name="sglang"), schema.ModelConfig(path="none"), env)
    read = []
    follower.receiver().receive(((name, read.append(name)) for name in ("a", "b")), 1)
    follower.follow()
    assert read == ["a", "b"]
    with pytest.raises(ValueError, match="rank 0 of a tensor-parallel group generates"):
        follower.generate([Request([1], SamplingParams(2, ()), 0)])


def test_memory_is_freed_after_the_kernels_that_use_it(monkeypatch):
    """The memory saver, of which SGLang has one object, is a package for GPUs."""
    calls = []

    class Saver:
        def pause(self, tag=None):
            calls.append(tag)

    package = ModuleType("torch_memory_saver")
    package.torch_memory_saver = Saver()
    monkeypatch.setitem(sys.modules, "torch_memory_saver", package)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("wait"))
    for _ in range(2):
        loader.wait_before_unmapping()
    package.torch_memory_saver.pause(tag="weights")
    package.torch_memory_saver.pause("kv_cache")
    assert calls == ["wait", "weights", "wait", "kv_cache"]


# ---- with SGLang ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The folder of `make_tiny`, with a model of `SHAPE`, which kernels of GPUs support."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = make_tiny(tmp_path_factory.mktemp("tiny"))
    config = AutoConfig.from_pretrained(folder / "model")
    config.update({key: value for key, value in SHAPE.items() if key != "vocab_size"} | {"head_dim": 64})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder / "model")
    return folder


@real
def test_arguments_are_those_of_the_installed_sglang(tiny):
    known = settings.probe(on_gpu=False).arguments
    assert {"attention_backend", "page_size", *OWNED, *settings._OWNED} - known <= {"tensor_parallel_size"}
    config = schema.RolloutConfig(name="sglang", engine_kwargs=schema.EngineKwargs(sglang={"page_sise": 1}))
    with pytest.raises(ValueError, match=r"engine_kwargs\.sglang\.page_sise: .* did you mean page_size\?"):
        make_rollout_engine("sglang", config, schema.ModelConfig(path=str(tiny / "model")), ENV)


@real
@pytest.mark.parametrize("ranks", [1, 2])
def test_bits_that_change_on_their_way_to_the_scheduler_are_found(ranks, tiny, monkeypatch):
    from transformers import AutoModelForCausalLM

    if DEVICE == "cuda" and torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    env = replace(ENV, device=resolve_device(DEVICE), compute_dtype=DTYPE, world_size=ranks, tp_size=ranks)
    limits = dict(max_num_seqs=8, gpu_memory_utilization=0.2, enforce_eager=True)
    kwargs = schema.EngineKwargs(sglang=KWARGS)
    config = schema.RolloutConfig(name="sglang", prompt_length=16, response_length=16, engine_kwargs=kwargs, **limits)
    rollout = make_rollout_engine("sglang", config, schema.ModelConfig(path=str(tiny / "model")), env)
    module = AutoModelForCausalLM.from_pretrained(tiny / "model", dtype=torch.float32)
    named = [(name, parameter.detach().to(DEVICE)) for name, parameter in module.named_parameters()]
    request = Request([1, 2], SamplingParams(4, (), temperature=0.0), 0)
    rollout.receiver().prepare_release()  # a GPU has done this before
    rollout.receiver().receive(named, 1)
    before = rollout.generate([request])[0].log_probs
    name = "model.layers.1.mlp.up_proj.weight"
    monkeypatch.setattr(weights, "sums_of_bits", lambda tensors: loader.sums_of_bits(restored(tensors)))
    with pytest.raises(ValueError, match=rf"rank 0 cannot load .* that were sent, found others in 1 of .*'{name}'"):
        rollout.receiver().receive(altered(named), 3)
    with pytest.raises(ValueError, match="has no weights"):
        rollout.generate([request])
    monkeypatch.undo()
    rollout.receiver().receive(named, 3)
    assert rollout.generate([request])[0].log_probs == pytest.approx(before, abs=1e-6 if IS_FLOAT32 else 1e-2)
    rollout.service.engine.shutdown()


def altered(stream):
    """The weights, one of which is replaced on its way."""
    for name, tensor in stream:
        yield name, tensor + 1.0 if name == "model.layers.1.mlp.up_proj.weight" else tensor


def restored(parameters):
    return [(n, t - 1.0 if n == "model.layers.1.mlp.up_proj.weight" else t) for n, t in parameters]


@contextmanager
def mixture(family: str, folder: Path, cache: dict | None = None, **keys) -> Iterator[tuple]:
    """An engine that reports the experts, with the weights of a model, and the model."""
    module = save_mixture(family, folder)
    config = schema.RolloutConfig(
        name="sglang", enable_rollout_routing_replay=True, gpu_memory_utilization=0.2, enforce_eager=True,
        engine_kwargs=schema.EngineKwargs(sglang=KWARGS | (cache or {})), **keys,
    )  # fmt: skip
    env = replace(ENV, device=resolve_device(DEVICE), compute_dtype=DTYPE)
    rollout = make_rollout_engine("sglang", config, schema.ModelConfig(path=str(folder)), env)
    try:
        rollout.receiver().receive([(name, p.detach().to(DEVICE)) for name, p in module.named_parameters()], 1)
        yield rollout, module
    finally:
        rollout.service.engine.shutdown()


@real
@pytest.mark.parametrize("family", MIXTURES)
def test_the_experts_of_a_response_are_those_of_the_model(family, tmp_path):
    with mixture(family, tmp_path, prompt_length=16, response_length=112, max_num_seqs=8) as (rollout, module):
        check_mixture(rollout, module, exact=IS_FLOAT32)


@real
@pytest.mark.parametrize(("tokens", "cache"), [(24, {"max_total_tokens": 400}), (64, {}), (None, {})])
def test_experts_of_prompts_that_are_computed_in_chunks(tokens, cache, tmp_path):
    """Several samples of prompts with a shared beginning, in chunks of 24 or 64 tokens or whole; with a cache of 400
    tokens, which few responses fit into at a time."""
    keys = dict(enable_chunked_prefill=tokens is not None, max_num_batched_tokens=tokens or 128, max_num_seqs=32)
    random = torch.Generator().manual_seed(0)
    shared, *own = (torch.randint(1, 53, (30,), generator=random).tolist() for _ in range(9))
    prompts = [shared[: 10 * (i % 4)] + own[i][: 4 * i + 1] for i in range(8) for _ in range(4)]
    requests = make_requests(prompts, SamplingParams(32, (3,), seed=5), limits=[1 + i % 32 for i in range(32)])
    with mixture("qwen3_moe", tmp_path, cache, prompt_length=64, response_length=32, **keys) as (rollout, module):
        for _ in range(2):
            check_experts(module, requests, rollout.generate(requests), exact=IS_FLOAT32)


@real
def test_two_steps_of_grpo(tiny, tmp_path):
    from transformers import AutoModelForCausalLM

    steps = ["trainer.total_training_steps=2", "trainer.resume_mode=disable"]
    chosen = ["actor_rollout_ref.rollout.name=sglang", f"trainer.device={DEVICE}"]
    chosen += [f"{key}.dtype={DTYPE}".replace("torch.", "") for key in ("actor_rollout_ref.rollout", ACTOR)]
    chosen += ["actor_rollout_ref.rollout.enforce_eager=true", "actor_rollout_ref.rollout.gpu_memory_utilization=0.3"]
    chosen += [f"actor_rollout_ref.rollout.engine_kwargs.sglang.{key}={value}" for key, value in KWARGS.items()]
    # training and the engine each round; the weights of the second step are a little different
    module = AutoModelForCausalLM.from_pretrained(tiny / "model", dtype=torch.float32)
    bound = 2e-5 if IS_FLOAT32 else 2 * rounding(module.to(DEVICE))
    found = grpo_reports(*run_settings(tiny, tmp_path / "run"), *steps, *chosen)
    for step, report in enumerate(found):
        assert report.metrics["rollout/logprob_gap_max"] < bound
        assert report.batch.batch["weight_version"].tolist() == [step] * len(report.batch)
        assert report.metrics["weight_sync/bytes"] > 0
    assert len(found) == 2
