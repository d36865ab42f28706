"""LoRA adapters that vLLM applies. Tests of `real` need vLLM: make test-vllm."""

import importlib.util
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, StableLmConfig

from tests.rollout.asynchronous_runs import grpo_reports, model_folder
from tests.rollout.contract import save_model
from tests.trainer.conftest import run_settings
from tests.vl_models import save_vl_model
from verl.config import schema
from verl.rollout.adapters import AdaptedLayers
from verl.rollout.base import RolloutEnv
from verl.rollout.engine_copy import EngineCopy
from verl.rollout.vllm.adapters import VllmAdapterReceiver, lora_args, obstacles
from verl.trainer.ppo.canary import StaleWeightsError

pytest.importorskip("peft")

BOUND = 2e-5  # of log-probs, as in test_engine_contract.py

real = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make test-vllm")
ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"
LAYER = "model.layers.0.self_attn.q_proj"


# ---- what is asked of vLLM, and what is accepted ----------------------------------------------------------------


def test_the_rank_is_rounded_up_to_one_that_vllm_has():
    for rank, of_vllm in ((1, 8), (8, 8), (9, 16), (129, 256), (257, 320), (512, 512)):
        layers = AdaptedLayers(("model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj", "lm_head"), rank)
        args = lora_args(layers)
        assert (args["max_lora_rank"], args["lora_target_modules"]) == (of_vllm, ["lm_head", "q_proj"])
        assert args["enable_lora"] and args["max_loras"] == args["max_cpu_loras"] == 1


def receiver():
    """A receiver without an engine. Its calls of the memory are recorded."""
    calls = []
    memory = SimpleNamespace(sleep=lambda: calls.append("sleep"), drop=lambda: calls.append("drop"))
    stepper = SimpleNamespace(exclusive=lambda what, idle=False: nullcontext([]))
    engine = SimpleNamespace(memory=memory, stepper=stepper)
    found = VllmAdapterReceiver(engine, dict, filled=False, layers=AdaptedLayers(("a",), 2))
    return found, calls


def test_release_keeps_the_base_weights_which_are_not_trained():
    found, calls = receiver()
    with pytest.raises(ValueError, match="has no weights: push them first"):
        found.receive_adapters({"scaling": {}}, [], 1)
    with pytest.raises(ValueError, match="has no weights: push them first"):
        found.check_filled()
    found.release()
    assert calls == ["drop"] and not found.has_base
    found.has_base = True  # as after `receive`
    with pytest.raises(ValueError, match=r"has the base weights, but no adapters: .* set rollout\.lora_sync=merged"):
        found.check_filled()
    found.filled = True
    found.check_filled()
    found.release()
    assert calls == ["drop", "sleep"] and found.has_base and not found.filled


def copy_of(path) -> EngineCopy:
    env = RolloutEnv(0, 1, 0, torch.device("cpu"), 0, torch.float32)
    return EngineCopy.from_arguments(schema.RolloutConfig(name="vllm"), schema.ModelConfig(path=str(path)), env, None)


def test_adapters_that_vllm_does_not_apply(tmp_path):
    found = [*obstacles(copy_of(save_model("moe", tmp_path)), AdaptedLayers((LAYER,), 513))]
    assert found[0] == "expected a rank of at most 512, found 513"
    assert found[1].startswith("with LoRA, vLLM chooses kernels for experts") and len(found) == 2
    vision = copy_of(save_vl_model("qwen2_vl", tmp_path / "vision"))
    inside, tower = "model.language_model.layers.0.self_attn.q_proj", "model.visual.blocks.0.attn.proj"
    text = f"expected adapters in the language model only, found {tower}"
    assert next(obstacles(vision, AdaptedLayers((inside, tower), 8))) == text


# ---- with vLLM --------------------------------------------------------------------------------------------------


@real
def test_models_whose_adapters_vllm_cannot_apply_are_known_before_the_engine_is_made(tmp_path):
    small = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=64)
    module = AutoModelForCausalLM.from_config(StableLmConfig(**small, num_key_value_heads=2))
    module.save_pretrained(tmp_path / "other")
    for path, expected in (
        (save_model("llama", tmp_path), []),
        (tmp_path / "other", ["vLLM's model for stablelm does not support LoRA"]),
    ):
        assert [*obstacles(copy_of(path), AdaptedLayers((LAYER,), 512))] == expected


# ---- runs -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A model of heads that vLLM accepts, with rows."""
    return model_folder(tmp_path_factory.mktemp("tiny"), model=("llama", "small"))


def run(tiny, folder, steps: int, *more: str) -> list:
    """The reports of a run of GRPO with LoRA."""
    settings = [f"{MODEL}.lora_rank=4", "actor_rollout_ref.actor.optim.lr=1e-2", f"{ROLLOUT}.name=vllm"]
    settings += [f"{ROLLOUT}.check_every=1", f"trainer.total_training_steps={steps}"]
    return grpo_reports(*run_settings(tiny, folder), *settings, *more)


def pushed_bytes(reports) -> list[int]:
    for report in reports:
        assert report.metrics["rollout/logprob_gap_max"] < BOUND
        assert report.metrics.get("weight_sync/canary_mismatch", 0) < BOUND
    return [int(report.metrics["weight_sync/bytes"]) for report in reports]


@real
@pytest.mark.timeout(600)
def test_a_run_pushes_adapters_and_is_resumed(tiny, tmp_path, caplog):
    with caplog.at_level("INFO", "verl.rollout.adapters"):
        first = run(tiny, tmp_path / "run", 2, "trainer.save_freq=2")
    assert "lora_sync=auto: vllm applies the adapters of 14 layers (rank 4)" in caplog.text
    second = run(tiny, tmp_path / "run", 4)
    assert [report.batch.batch["weight_version"].unique().tolist() for report in (*first, *second)] == [
        [0],
        [1],
        [2],
        [3],
    ]
    sizes = {*pushed_bytes(first), *pushed_bytes(second)}
    merged = run(tiny, tmp_path / "merged", 2, f"{ROLLOUT}.lora_sync=merged")
    assert len(sizes) == 1 and max(sizes) < 0.2 * min(pushed_bytes(merged))
    print(f"bytes of a push: adapters {sizes}, merged {pushed_bytes(merged)}")
    rewards = [[report.metrics["critic/score/mean"] for report in found] for found in (first, merged)]
    assert rewards[0] == pytest.approx(rewards[1])  # the same tokens were sampled


@real
@pytest.mark.timeout(600)
def test_requests_without_the_adapter_stop_the_run(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("verl.rollout.vllm.engine.lora_request", lambda: None)
    with pytest.raises(StaleWeightsError):
        run(tiny, tmp_path / "run", 3)


PLACEMENTS = {
    "shared": ("trainer.n_gpus_per_node=2",),  # FSDP2 on 2
    "separate": ("trainer.n_gpus_per_node=3", "placement.actor_devices=[0]", "placement.rollout_devices=[1,2]"),
}


@real
@pytest.mark.timeout(600)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_tensor_parallel_ranks_have_their_slices_of_the_adapters(placement, tiny, tmp_path):
    settings = (*PLACEMENTS[placement], f"{ROLLOUT}.tensor_model_parallel_size=2")
    sizes = pushed_bytes(run(tiny, tmp_path / "run", 2, *settings))
    merged = run(tiny, tmp_path / "merged", 1, *settings, f"{ROLLOUT}.lora_sync=merged")
    # of slices, a rank has some already
    stored = pushed_bytes(merged)[0] + merged[0].metrics.get("weight_sync/kept_bytes", 0)
    assert len({*sizes}) == 1 and sizes[0] < 0.2 * stored
