"""LoRA adapters that vLLM applies. Tests of `real` need vLLM: make test-vllm."""

import importlib.util
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, StableLmConfig

from tests.engines.ranks import make_engine
from tests.rollout.asynchronous_runs import grpo_reports, model_folder
from tests.rollout.contract import save_model
from tests.trainer.conftest import run_settings
from tests.vl_models import save_vl_model
from verl.config import schema
from verl.engines.loading import adapter_config
from verl.rollout.base import RolloutEnv
from verl.rollout.engine_copy import EngineCopy
from verl.rollout.vllm import adapters as adapters_module
from verl.rollout.vllm.adapters import (
    AdaptedLayers,
    VllmAdapterReceiver,
    applied_layers,
    checked_pairs,
    lora_args,
    obstacles,
)
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


# ---- which adapters are applied --------------------------------------------------------------------------------------

LAYERS = AdaptedLayers(("model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj", "lm_head"), 4)
ADAPTERS = {"r": 2, "rank_pattern": {"lm_head": 4}, "scaling": dict.fromkeys(LAYERS.names, 1.0)}
PUSHED = "the base weights are pushed once"


@pytest.mark.parametrize(
    ("setting", "adapters", "obstacles", "applied", "text"),
    [
        ("auto", ADAPTERS, [], True, f"lora_sync=auto: vllm applies the adapters of 3 layers (rank 4); {PUSHED}"),
        ("adapters", ADAPTERS, [], True, PUSHED),
        ("merged", ADAPTERS, [], False, "lora_sync=merged: vllm gets all weights in every push"),
        ("auto", ADAPTERS, ["too old", "too large"], False, "gets merged weights in every push: too old; too large"),
        ("adapters", None, [], False, ""),
    ],
)
def test_the_log_of_rank_0_says_what_is_pushed_and_why(
    setting, adapters, obstacles, applied, text, caplog, monkeypatch
):
    monkeypatch.setattr(adapters_module, "obstacles", lambda copy, layers: iter(obstacles))
    copy = SimpleNamespace(config=schema.RolloutConfig(name="vllm", lora_sync=setting))
    for rank in (0, 1):  # workers may log INFO on every rank (VERL_LOGGING_LEVEL)
        caplog.clear()
        with caplog.at_level("INFO", "verl.rollout.vllm.adapters"):
            env = RolloutEnv(rank, 2, rank, torch.device("cpu"), 0, torch.float32, adapters=adapters)
            assert applied_layers(copy, env) == (LAYERS if applied else None)
        assert (text in caplog.text) if rank == 0 and text else not caplog.text


def test_adapters_that_cannot_be_applied_are_refused_if_they_are_required(monkeypatch):
    monkeypatch.setattr(adapters_module, "obstacles", lambda copy, layers: iter(["it is too old"]))
    copy = SimpleNamespace(config=schema.RolloutConfig(name="vllm", lora_sync="adapters"))
    env = RolloutEnv(0, 1, 0, torch.device("cpu"), 0, torch.float32, adapters=ADAPTERS)
    message = r"lora_sync=adapters: vllm cannot apply these adapters: it is too old: set rollout\.lora_sync=merged"
    with pytest.raises(ValueError, match=message):
        applied_layers(copy, env)


def test_a_rollout_process_knows_the_layers_of_the_trainer(tmp_path):
    """Separate devices: from the config.json and the `model` section, as the trainer's engine has them."""
    path = save_model("qwen2", tmp_path)
    keys = {"lora_rank": 3, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"]}
    for section in ({"lora_rank": 3}, keys):
        engine = make_engine(path, **section)
        config = adapter_config(schema.ModelConfig(path=path, **section))
        assert config == engine.adapter_config() and AdaptedLayers.from_config(config).rank == 3
    engine.adapters.settings.rank_pattern = {"q_proj": 7}
    engine.adapters.save(tmp_path, {})
    layers = AdaptedLayers.from_config(adapter_config(schema.ModelConfig(path=path, lora_adapter_path=str(tmp_path))))
    assert layers.rank == 7 and layers.modules == ["down_proj", "q_proj"]
    assert adapter_config(schema.ModelConfig(path=path)) is None


def adapter(name: str, rank: int = 2, inputs: int = 3, outputs: int = 4, rank_of_b: int | None = None):
    yield f"base_model.model.{name}.lora_A.weight", torch.ones(rank, inputs)
    yield f"base_model.model.{name}.lora_B.weight", torch.ones(outputs, rank_of_b or rank)


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        ([*adapter("a")], r"adapters of version 5: 1 are missing, first \['b'\]"),
        ([*adapter("a"), *adapter("c")], "layer 'c' is unknown or was sent twice"),
        ([*adapter("a"), *adapter("a")], "layer 'a' is unknown or was sent twice"),
        ([*adapter("a", rank=3)], r"a has A \(3, 3\) and B \(4, 3\), expected \(r, 3\) and \(4, r\) with r up to 2"),
        ([*adapter("a", inputs=4)], r"a has A \(2, 4\) and B \(4, 2\), expected"),
        ([*adapter("a", outputs=3)], r"a has A \(2, 3\) and B \(3, 2\), expected"),
        ([*adapter("a", rank_of_b=1)], r"a has A \(2, 3\) and B \(4, 1\), expected"),
        ([*adapter("a")][:1], "one of lora_A and lora_B of a is missing"),
        ([("base_model.model.a.modules_to_save.weight", torch.ones(1))], "expected names <layer>.lora_A.weight"),
    ],
)
def test_adapters_of_other_layers_or_shapes_are_refused(sent, message):
    layers, shapes = AdaptedLayers(("a", "b"), 2), {"a.weight": torch.Size((4, 3)), "b.weight": torch.Size((4, 3))}
    with pytest.raises(ValueError, match=message):
        list(checked_pairs(sent, layers, shapes, 5))
    found = checked_pairs([*adapter("b", rank=1), *adapter("a")], layers, shapes, 5)
    assert [(name, tuple(a.shape), tuple(b.shape)) for name, a, b in found] == [
        ("b", (1, 3), (4, 1)),
        ("a", (2, 3), (4, 2)),
    ]


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
    with caplog.at_level("INFO", "verl.rollout.vllm.adapters"):
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
