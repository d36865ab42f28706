"""Model FLOPs utilization, with figures worked out by hand and by torch's counter of FLOPs."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig

from verl.config import schema
from verl.planner.devices import BUILT_IN
from verl.planner.shapes import ModelShape
from verl.protocol import DataProto
from verl.workers import utilization
from verl.workers.engine_worker import Utilization, forward_flops

SIZES = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"vocab_size": 40}
QWEN2 = Qwen2Config(**SIZES, intermediate_size=24, attn_implementation="eager")


def test_the_matmuls_are_those_that_torch_counts():
    """Without attention, whose upper triangle torch counts too."""
    shape, length = ModelShape.from_config(QWEN2.to_dict()), 7
    with FlopCounterMode(display=False) as counter:
        Qwen2ForCausalLM(QWEN2)(torch.arange(length)[None])
    counted = counter.get_flop_counts()["Global"]
    everything = counted[torch.ops.aten.mm] + counted.get(torch.ops.aten.addmm, 0)
    attention = 4 * 16 * 3 * length * (length + 1) / 2  # two products of q_size over the keys so far, in 3 layers
    assert forward_flops(shape, [length], outputs=length) - attention == everything
    assert forward_flops(shape, [length], 2) == forward_flops(shape, [length], 7) - 5 * 2 * 16 * 40
    assert forward_flops(shape, [3, 4], 0) == forward_flops(shape, [3], 0) + forward_flops(shape, [4], 0)
    assert forward_flops(shape, [1], 1, value_head=True) == forward_flops(shape, [1], 0) + 2 * 16


def test_experts_count_if_they_are_chosen():
    config = Qwen3MoeConfig(**SIZES, head_dim=4, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=12)
    attention = 16 * (16 + 2 * 8) + 16 * 16
    per_token = 3 * (attention + 16 * 8 + 2 * 3 * 16 * 12)
    assert forward_flops(ModelShape.from_config(config.to_dict()), [1], 0) == 2 * per_token + 4 * 16 * 3


def test_the_share_of_the_peak_rate(tmp_path, monkeypatch):
    QWEN2.save_pretrained(tmp_path)
    model, cuda = schema.ModelConfig(path=str(tmp_path)), SimpleNamespace(type="cuda")
    monkeypatch.setattr(utilization.torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    found = Utilization.find(model, "causal_lm", cuda, 2, "auto")
    ones = torch.ones(2, 5, dtype=torch.long)
    mask = torch.tensor([[1, 1], [1, 0]])
    batch = DataProto.from_dict({"attention_mask": ones, "response_mask": mask})
    flops = 3 * forward_flops(ModelShape.from_config(QWEN2.to_dict()), [5, 5], 3)
    assert found.mfu(batch, 0.5) == pytest.approx(flops / (0.5 * 2 * 989e12))
    assert Utilization.find(model, "causal_lm", cuda, 2, "fp32") is None
    assert Utilization.find(model, "causal_lm", torch.device("cpu"), 1, "bf16") is None
    monkeypatch.setattr(utilization.torch.cuda, "get_device_name", lambda _: "NVIDIA GB999")
    assert Utilization.find(model, "causal_lm", cuda, 1, "auto") is None
    assert all(device.peak > 1e14 for device in BUILT_IN.values())
