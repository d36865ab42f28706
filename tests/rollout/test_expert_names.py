"""The weights of experts under the names of checkpoints and of other engines."""

import pytest
import torch

from verl.rollout.expert_names import ExpertNames

LAYER = "model.layers.3."
FUSED = {"gate_up_proj": torch.arange(48.0).view(2, 6, 4), "down_proj": torch.arange(24.0).view(2, 4, 3)}
#: folder of the experts, and the three projections of an expert in a checkpoint
CHECKPOINTS = {
    "mixtral": ("block_sparse_moe.experts.", ("w1", "w3", "w2")),
    "qwen3-moe": ("mlp.experts.", ("gate_proj", "up_proj", "down_proj")),
}


@pytest.mark.parametrize("inner", ["", "routed_experts."])
@pytest.mark.parametrize("family", CHECKPOINTS)
def test_fused_experts_are_split_into_those_of_a_checkpoint(family, inner):
    folder, projections = CHECKPOINTS[family]
    names = ExpertNames({LAYER + folder + inner + own for own in ("w13_weight", "w2_weight")})
    assert names.target(f"{LAYER}mlp.experts.gate_up_proj") == f"{LAYER}{folder}{inner}w13_weight"
    assert names.target(f"{LAYER}mlp.experts.down_proj") == f"{LAYER}{folder}{inner}w2_weight"
    found = {}
    for kind, tensor in FUSED.items():
        found |= names.unfused(f"{LAYER}mlp.experts.{kind}", tensor)
    gate_up, down = FUSED["gate_up_proj"], FUSED["down_proj"]
    expected = {}
    for expert in range(2):
        parts = gate_up[expert, :3], gate_up[expert, 3:], down[expert]
        expected |= {f"{LAYER}{folder}{expert}.{name}.weight": part for name, part in zip(projections, parts)}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("name", ["mlp.gate.weight", "mlp.down_proj.weight", "mlp.down_proj", "mlp.experts.bias"])
def test_other_parameters_are_not_split(name):
    names, tensor = ExpertNames({LAYER + "mlp.experts.w13_weight", LAYER + name}), torch.ones(2, 4)
    assert names.target(LAYER + name) is None
    assert list(names.unfused(LAYER + name, tensor)) == [(LAYER + name, tensor)]
