"""Mixtures of experts with the vLLM adapter: settings, and with vLLM the push of their weights and their choices.

Tests of `real` need vLLM: make test-vllm.
"""

import copy
import importlib.util
import os
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

from tests.engines.ranks import run_on_ranks
from tests.rollout.asynchronous_runs import grpo_reports, model_folder
from tests.rollout.canary_check import check_canary
from tests.rollout.mixtures import MIXTURES, OTHERS, SHAPE, check_mixture, expected_experts, save_mixture
from tests.trainer.conftest import run_settings
from verl.config import schema
from verl.rollout.base import RolloutEnv, make_rollout_engine
from verl.rollout.engine_copy import EngineCopy
from verl.rollout.request import Request, SamplingParams
from verl.rollout.routed_experts import layers_with_experts
from verl.rollout.vllm import settings
from verl.rollout.vllm.weights import expert_layers
from verl.trainer.ppo.canary import StaleWeightsError

real = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make test-vllm")
ENV = RolloutEnv(0, 1, 0, torch.device("cpu"), 0, torch.float32)


# ---- settings -------------------------------------------------------------------------------------------------------


MIXTURE = MixtralConfig(hidden_size=64, num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=2)


def copy_of(hf_config, **keys) -> EngineCopy:
    """keys: of the `rollout` section."""
    config = schema.RolloutConfig(name="vllm", **keys)
    return EngineCopy(config, schema.ModelConfig(path="m"), hf_config, torch.float32, is_trained=True)


def test_experts_are_computed_by_kernels_with_the_layout_of_their_weights(monkeypatch):
    monkeypatch.setattr(settings, "memory_share", lambda asked, device: asked)
    dense = LlamaConfig(hidden_size=64, num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=2)
    on_gpu = replace(ENV, device=torch.device("cuda", 0))
    for config, env, expected in ((MIXTURE, on_gpu, "triton"), (MIXTURE, ENV, None), (dense, on_gpu, None)):
        found = settings.engine_args(copy_of(config), env)
        assert found.get("moe_backend") == expected and "enable_return_routed_experts" not in found


class Experts(torch.nn.Module):
    """A layer of experts as in vLLM."""

    def __init__(self, kernels: str):
        super().__init__()
        self.w13_weight = torch.nn.Parameter(torch.empty(2, 8, 4))
        self.quant_method = SimpleNamespace(unquantized_backend=SimpleNamespace(name=kernels))


def test_experts_in_another_layout_are_refused():
    model = torch.nn.Sequential(Experts("TRITON"), Experts("FLASHINFER_TRTLLM"))
    with pytest.raises(ValueError, match=r"kernels TRITON, .* found FLASHINFER_TRTLLM for 1: weights cannot be pushed"):
        expert_layers(model)
    assert list(expert_layers(model[:1])) == ["0"]


def test_the_experts_of_a_rollout_are_refused_where_vllm_does_not_report_them(monkeypatch):
    monkeypatch.setattr(settings, "memory_share", lambda asked, device: asked)
    on_gpu, made = replace(ENV, device=torch.device("cuda")), copy_of(MIXTURE, enable_rollout_routing_replay=True)
    assert settings.engine_args(made, on_gpu)["enable_return_routed_experts"] is True
    with pytest.raises(ValueError, match=r"vllm on cpu.*does not report the experts .*native, or"):
        settings.engine_args(made, ENV)


def scaled(module: torch.nn.Module):
    return ((name, parameter.detach() * 1.5) for name, parameter in module.named_parameters())


@pytest.fixture(scope="module", params=MIXTURES | OTHERS)
def mixture(request, tmp_path_factory):
    """An engine of a mixture of experts with its weights, and the source of them."""
    folder = tmp_path_factory.mktemp(request.param)
    module = save_mixture(request.param, folder)
    config = schema.RolloutConfig(name="vllm", prompt_length=16, response_length=112, max_num_seqs=8)
    rollout = make_rollout_engine("vllm", config, schema.ModelConfig(path=str(folder)), ENV)
    rollout.receiver().receive(module.named_parameters(), 1)
    return rollout, module


def after_a_dense_model(dense: str, mixed: str, tp: int) -> list:
    """For `run_on_ranks`: greedy responses of a dense model, of a mixture of experts and of the dense one again."""
    rank, lengths = int(os.environ["RANK"]), {"prompt_length": 16, "response_length": 16}
    config = schema.RolloutConfig(name="vllm", max_num_seqs=8, tensor_model_parallel_size=tp, **lengths)
    env = replace(ENV, rank=rank, local_rank=rank, world_size=tp, tp_rank=rank, tp_size=tp)
    engines, found = [], []
    for path in (dense, mixed):
        engines.append(make_rollout_engine("vllm", config, schema.ModelConfig(path=path), env))
        weights = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).named_parameters()
        engines[-1].receiver().receive(weights, 1)
    for engine in (*engines, engines[0]):
        if rank > 0:
            engine.follow()
            continue
        with engine.leading():
            (completion,) = engine.generate([Request([1, 2, 3], SamplingParams(8, (), temperature=0.0), 0)])
        found.append(completion.token_ids)
    return found


@real
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("tp", [1, 2])
def test_a_mixture_after_a_dense_model_in_one_process(tp, tmp_path):
    mixed = save_mixture("qwen3_moe", tmp_path / "mixed")
    dense = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE | {"intermediate_size": 64}), dtype=torch.float32)
    dense.save_pretrained(tmp_path / "dense")
    expected = []
    for module in (dense, mixed):
        tokens = module.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=8, do_sample=False, eos_token_id=None)
        expected.append(tokens[0, 3:].tolist())
    found = run_on_ranks(tp, after_a_dense_model, str(tmp_path / "dense"), str(tmp_path / "mixed"), tp)
    assert found[0] == [*expected, expected[0]]


@real
def test_a_push_of_experts_is_what_is_computed(mixture):
    rollout, module = mixture
    params = SamplingParams(12, (), temperature=0.0)
    (before,) = rollout.generate([Request([1, 2, 3], params, 0)])
    rollout.receiver().receive(scaled(module), 2)
    (found,) = rollout.generate([Request([1, 2, 3], params, 0)])
    other = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
        logits = other(torch.tensor([[1, 2, 3, *found.token_ids]])).logits[0, 2:-1].log_softmax(-1)
    assert logits.argmax(-1).tolist() == found.token_ids
    assert found.log_probs == pytest.approx(logits.max(-1).values.tolist(), abs=2e-5)
    assert found.log_probs[0] != pytest.approx(before.log_probs[0], abs=1e-2)
    rollout.receiver().receive(module.named_parameters(), 3)
    assert rollout.generate([Request([1, 2, 3], params, 0)]) == [before]


@real
def test_packed_experts_that_keep_their_weights_are_found_by_the_canary(mixture, monkeypatch):
    from verl.rollout.vllm.weights import engine_model

    rollout, module = mixture
    other = copy.deepcopy(module)
    torch.manual_seed(0)
    with torch.no_grad():
        for key, parameter in other.named_parameters():
            if ".experts." in key:
                parameter.normal_(0, 0.2)
            elif key.endswith("norm.weight"):
                parameter.fill_(1)  # otherwise the logits are flat, whatever the experts compute
    layer = list(expert_layers(engine_model(rollout.llm)).values())[-1]
    for part in ("w13_weight", "w2_weight"):
        loads = getattr(layer, part).weight_loader
        # not what the memory of an earlier push still holds, which would be the right weights
        getattr(layer, part).weight_loader = lambda param, *args, **keys: param.data.zero_().numel() > 0
        rollout.receiver().receive(other.named_parameters(), 2)
        with pytest.raises((StaleWeightsError, ValueError)):  # or log-probs that are not finite
            check_canary(rollout, other, 2)
        getattr(layer, part).weight_loader = loads
    kernels = layer.quant_method.moe_kernel.fused_experts
    monkeypatch.setattr(kernels, "process_weights_after_loading", lambda layer: None)
    rollout.receiver().receive(other.named_parameters(), 2)
    with pytest.raises((StaleWeightsError, ValueError)):
        check_canary(rollout, other, 2)
    monkeypatch.undo()
    rollout.receiver().receive(module.named_parameters(), 3)
    check_canary(rollout, module, 3)


@real
def test_experts_that_vllm_reports(mixture, monkeypatch):
    """vLLM collects them on GPUs only: here its engine gets those of the model from the test."""
    rollout, module = mixture
    engine, layers = rollout.llm.llm_engine, layers_with_experts("vllm", dict(module.named_parameters()))
    states, tokens, get_output = engine.output_processor.request_states, {}, engine.engine_core.get_output

    def with_experts():
        found = get_output()
        for output in found.outputs:
            key = output.request_id
            done = tokens.setdefault(key, list(states[key].prompt_token_ids))
            start = 0 if output.request_id not in started else len(done) - 1
            started.add(key)
            done += output.new_token_ids
            rows = np.zeros((len(done) - 1 - start, SHAPE["num_hidden_layers"], 2), np.uint8)
            rows[:, layers] = expected_experts(module, done)[start:]
            output.routed_experts = rows
        return found

    started: set[str] = set()
    monkeypatch.setattr(engine.engine_core, "get_output", with_experts)
    monkeypatch.setattr(rollout.stepper, "_recorded_layers", layers)
    check_mixture(rollout, module)
    monkeypatch.undo()
    monkeypatch.setattr(rollout.stepper, "_recorded_layers", layers)
    with pytest.raises(ValueError, match="expected the experts of 5 tokens, found those of 0: this version"):
        rollout.generate([Request([1, 2], SamplingParams(4, ()), 0)])


@real
@pytest.mark.timeout(600)
def test_experts_of_two_ranks(tmp_path):
    """Each rank has a part of every expert: FSDP2 on 2 -> tensor parallelism of 2, with canary responses."""
    tiny, rollout = model_folder(tmp_path, moe=("mixtral", "small")), "actor_rollout_ref.rollout"
    chosen = [f"actor_rollout_ref.model.path={tmp_path / 'moe'}", "trainer.n_gpus_per_node=2", f"{rollout}.name=vllm"]
    chosen += [f"{rollout}.tensor_model_parallel_size=2", f"{rollout}.check_every=1", "trainer.total_training_steps=2"]
    found = grpo_reports(*run_settings(tiny, tmp_path / "run"), *chosen)
    assert [report.batch.batch["weight_version"].unique().tolist() for report in found] == [[0], [1]]
    for report in found:
        assert report.metrics["rollout/logprob_gap_max"] < 2e-5 and report.metrics["weight_sync/bytes"] > 0
