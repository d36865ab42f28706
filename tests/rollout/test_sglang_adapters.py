"""LoRA adapters that SGLang applies."""

import pytest
import torch

from tests.rollout.contract import save_model
from verl.config import schema
from verl.rollout.adapters import AdaptedLayers
from verl.rollout.base import RolloutEnv
from verl.rollout.engine_copy import EngineCopy
from verl.rollout.sglang.adapters import FollowerAdapterReceiver, lora_args, obstacles

pytest.importorskip("peft")

LAYERS = AdaptedLayers(("model.layers.0.self_attn.v_proj", "model.layers.1.mlp.up_proj"), 5)


def test_fused_layers_are_adapted_in_full():
    args = lora_args(LAYERS, on_gpu=True, memory_saver=True)
    assert args["lora_target_modules"] == ["gate_proj", "k_proj", "q_proj", "up_proj", "v_proj"]
    assert args["max_lora_rank"] == 5 and args["max_loras_per_batch"] == 1 and "lora_backend" not in args
    assert args["enable_weights_cpu_backup"]  # the base weights are sent once, although their GPU memory is freed
    assert lora_args(LAYERS, on_gpu=False, memory_saver=False)["lora_backend"] == "torch_native"


def test_adapters_that_sglang_does_not_apply(tmp_path):
    def found(family: str, layers: AdaptedLayers, ranks: int = 1, device: str = "cpu") -> list[str]:
        env = RolloutEnv(0, ranks, 0, torch.device(device), 0, torch.float32, tp_size=ranks)
        model = schema.ModelConfig(path=save_model(family, tmp_path / family))
        copy = EngineCopy.from_arguments(schema.RolloutConfig(name="sglang"), model, env, None)
        return [*obstacles(copy, env, layers)]

    (tmp_path / "llama").mkdir()
    (tmp_path / "moe").mkdir()
    assert found("llama", LAYERS) == []
    head = AdaptedLayers((*LAYERS.names, "lm_head"), 5, has_one_rank=False)
    assert found("llama", head) == [
        "expected adapters of down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj, found lm_head",
        "expected one rank for all layers (no rank_pattern)",
    ]
    other = AdaptedLayers(("transformer.h.0.q_proj",), 5)
    assert found("llama", other) == ["expected names with .layers.NUMBER., found transformer.h.0.q_proj"]
    assert found("moe", LAYERS) == ["it is not supported for models with mixtures of experts"]
    # 2 heads of keys and values, and an MLP of 128
    assert found("llama", LAYERS, ranks=2) == [] == found("llama", LAYERS, ranks=4, device="cuda")
    assert found("llama", LAYERS, ranks=4) == [
        "on a CPU it pads weights, but not adapters: with tensor_model_parallel_size=4 expected num_key_value_heads "
        "divisible by 4 and intermediate_size by 128, found 2 and 128"
    ]


def test_followers_take_part_in_the_same_pushes():
    follower, read = FollowerAdapterReceiver(), []
    assert not follower.has_base
    follower.receive((read.append(n) or (str(n), torch.ones(1)) for n in range(3)), 1)
    assert follower.has_base
    follower.receive_adapters({}, (read.append(n) or (str(n), torch.ones(1)) for n in range(3, 5)), 1)
    follower.release()
    assert follower.has_base and read == [0, 1, 2, 3, 4]
