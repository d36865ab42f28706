"""Whether an engine of another library applies LoRA adapters: which layers, and what the log says otherwise."""

import logging
from dataclasses import replace

import pytest
import torch

from tests.engines.ranks import make_engine, qwen2, save_model
from verl.config import schema
from verl.engines.loading import adapter_config
from verl.rollout.adapters import AdaptedLayers, applied_layers, checked_pairs
from verl.rollout.base import RolloutEnv

pytest.importorskip("peft")

LAYERS = AdaptedLayers(("model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj", "lm_head"), 4)
ENV = RolloutEnv(0, 1, 0, torch.device("cpu"), 0, torch.float32, adapted_layers=LAYERS)


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    return save_model(qwen2(), tmp_path_factory.mktemp("model"))


def chosen(caplog, *obstacles: str, env: RolloutEnv = ENV, **keys) -> tuple[AdaptedLayers | None, str]:
    """The layers, and the log."""
    caplog.clear()
    with caplog.at_level(logging.INFO, "verl.rollout.adapters"):
        found = applied_layers("vllm", schema.RolloutConfig(name="vllm", **keys), env, lambda layers: iter(obstacles))
    return found, caplog.text


def test_the_log_says_what_is_pushed_and_why(caplog):
    found, text = chosen(caplog)
    assert (
        found is LAYERS and "vllm applies the adapters of 3 layers (rank 4); the base weights are pushed once" in text
    )
    found, text = chosen(caplog, lora_sync="merged")
    assert found is None and "lora_sync=merged: vllm gets all weights in every push" in text
    found, text = chosen(caplog, "it is too old", "the rank is too large")
    assert found is None and "vllm gets merged weights in every push: it is too old; the rank is too large" in text
    without = RolloutEnv(0, 1, 0, torch.device("cpu"), 0, torch.float32)
    assert chosen(caplog, env=without, lora_sync="adapters") == (None, "")


@pytest.mark.parametrize("obstacles, keys", [([], {}), ([], {"lora_sync": "merged"}), (["it is too old"], {})])
def test_only_rank_0_logs_it(obstacles, keys, caplog):
    """Also where workers log INFO on every rank (VERL_LOGGING_LEVEL)."""
    found = {rank: chosen(caplog, *obstacles, env=replace(ENV, rank=rank), **keys) for rank in (0, 1, 3)}
    assert found[0][1] and not found[1][1] and not found[3][1]
    assert found[0][0] == found[1][0] == found[3][0]


def test_adapters_that_cannot_be_applied_are_refused_if_they_are_required(caplog):
    message = r"lora_sync=adapters: vllm cannot apply these adapters: it is too old: set rollout\.lora_sync=merged"
    with pytest.raises(ValueError, match=message):
        chosen(caplog, "it is too old", lora_sync="adapters")


def test_a_rollout_process_knows_the_layers_of_the_trainer(path, tmp_path):
    """Separate devices: from the config.json and the `model` section, as the trainer's engine has them."""
    keys = {"lora_rank": 3, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"]}
    for section in ({"lora_rank": 3}, keys):
        engine = make_engine(path, **section)
        config = adapter_config(schema.ModelConfig(path=path, **section))
        assert config == engine.adapter_config()
        assert AdaptedLayers.from_config(config).rank == 3 and AdaptedLayers.from_config(config).has_one_rank
    engine.adapters.settings.rank_pattern = {"q_proj": 7}
    engine.adapters.save(tmp_path, {})
    layers = AdaptedLayers.from_config(adapter_config(schema.ModelConfig(path=path, lora_adapter_path=str(tmp_path))))
    assert layers.rank == 7 and not layers.has_one_rank and layers.modules == ["down_proj", "q_proj"]
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
