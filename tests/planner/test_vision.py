"""The planner counts the vision tower of a model: its parameters, and what it keeps for the backward pass."""

from dataclasses import replace

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForImageTextToText

from tests.planner.test_planner import H200, TINY, job_of
from tests.vl_models import MERGE, PATCH, QWEN, make_config, save_vl_model
from verl.modeling.attention import use_vision_attention
from verl.modeling.vision import tower_of
from verl.planner.memory import gradients, group_memory, tower_bytes, update_items
from verl.planner.shapes import VisionShape
from verl.planner.step_time import TOWER_BYTES
from verl.planner.workload import Role
from verl.trainer.checks.planning import shape_of

#: 1000 parameters with the projection, 900 of them in 3 layers of hidden size 16 and MLP 32; 4 patches of a
#: token, with 12 values each
VISION = VisionShape(1000, 900, 3, 16, 32, 4, 12)


@pytest.mark.parametrize("family", QWEN)
def test_parameters_are_those_of_the_model(family, tmp_path):
    found = shape_of(save_vl_model(family, tmp_path))
    model = AutoModelForImageTextToText.from_pretrained(tmp_path)
    assert found.parameters() == sum(p.numel() for p in model.parameters())
    assert found.vision.tower == sum(p.numel() for p in tower_of(model)[1].parameters())
    assert (found.vision.layers, found.vision.hidden, found.vision.patches) == (2, 16, MERGE**2)


def saved_bytes(model: torch.nn.Module, patches: int) -> int:
    """Bytes that autograd keeps in the vision tower, without the parameters."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    found: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    side = int(patches**0.5)
    with saved_tensors_hooks(note, lambda tensor: tensor):
        alive = tower_of(model)[1](torch.randn(patches, 6 * PATCH**2), grid_thw=torch.tensor([[1, side, side]]))
    del alive
    return sum(found.values())


@pytest.mark.parametrize("family", QWEN)
def test_activations_of_a_layer_are_those_that_autograd_keeps(family, tmp_path):
    patches, per_layer = 256, []
    for depth in (2, 3):
        config = make_config(family)
        config.vision_config.depth = depth
        if family == "qwen2_5_vl":
            config.vision_config.fullatt_block_indexes = [0, 1, 2]
        per_layer.append(saved_bytes(use_vision_attention(AutoModelForImageTextToText.from_config(config)), patches))
    measured = (per_layer[1] - per_layer[0]) / patches
    shape = shape_of(save_vl_model(family, tmp_path, weights=False))
    role = Role("actor", shape, trains=True, compute_bytes=4)
    assert 0.85 < tower_bytes(role).plain / shape.vision.patches / 2 / measured < 1.35


class MovedBytes(TorchDispatchMode):
    """Counts the bytes that kernels read and write in tensors with a row per patch, without matmuls and attention."""

    def __init__(self, patches: int):
        super().__init__()
        self.patches, self.count = patches, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given, made = ([x for x in tree_leaves(y) if isinstance(x, torch.Tensor)] for y in ((args, kwargs), out))
        own = {x.untyped_storage().data_ptr() for x in given}
        is_view = all(x.untyped_storage().data_ptr() in own for x in made) and not func._schema.name.endswith("_")
        if not is_view and not any(word in func._schema.name for word in ("mm", "attention", "convolution")):
            self.count += sum(x.nbytes for x in (*given, *made) if self.patches in x.shape)
        return out


def moved_bytes(hidden: int, mlp: int, layers: int) -> tuple[float, float]:
    """Bytes per patch of a forward and a backward pass of the tower of Qwen2.5-VL."""
    patches, config = 400, make_config("qwen2_5_vl")
    sizes = {"depth": layers, "hidden_size": hidden, "intermediate_size": mlp, "num_heads": 2}
    for name, value in (sizes | {"fullatt_block_indexes": list(range(layers))}).items():
        setattr(config.vision_config, name, value)
    tower = tower_of(use_vision_attention(AutoModelForImageTextToText.from_config(config)).float())[1]
    pixels, counted = torch.randn(patches, tower.patch_embed.proj.weight[0].numel()), MovedBytes(patches)
    with counted:
        with torch.autocast("cpu", torch.bfloat16):
            found = tower(pixels, grid_thw=torch.tensor([[1, 20, 20]])).pooler_output
        forward = counted.count
        found.float().sum().backward()
    return forward / patches, (counted.count - forward) / patches


def test_bytes_that_a_tower_moves_are_those_of_its_kernels():
    hidden, mlp = 128, 256
    (few, few_back), (many, many_back) = (moved_bytes(hidden, mlp, layers) for layers in (1, 2))
    expected = TOWER_BYTES[0] * hidden + TOWER_BYTES[1] * mlp
    assert many - few == pytest.approx(expected, rel=0.05)
    assert many_back - few_back == pytest.approx(2 * expected, rel=0.05)


def test_memory_of_an_update_by_hand():
    text, whole = job_of(TINY), job_of(replace(TINY, vision=VISION))
    assert whole.role("actor").parameters == TINY.parameters() + 1000
    frozen = whole.with_roles(["actor"], freezes_tower=True)
    assert frozen.role("actor").trained == TINY.parameters() + 100
    assert whole.with_roles(["actor"], lora_rank=4).role("actor").trained == TINY.lora_parameters(4)
    # of each patch, 11 hidden and 4 MLP vectors in 16 bits; the residual stream of 32 bits is 4 vectors of 2 bytes more
    layer = 2 * (11 * 16 + 4 * 32) + 4 * 2 * 16
    assert tower_bytes(whole.role("actor")).plain == 4 * 3 * layer
    assert tower_bytes(whole.role("actor")).checkpointed == 4 * (3 * 16 * 4 + layer)
    assert tower_bytes(frozen.role("actor")).plain == 0
    found = [update_items(job, job.role("actor"), H200, 0.0) for job in (text, frozen, whole)]
    # 64 samples of 128 + 128 tokens: 8192 prompt tokens
    assert found[2]["activations"] - found[1]["activations"] == 8192 * 4 * 3 * layer
    assert found[1]["activations"] == found[0]["activations"]
    assert [gradients(job, job.role("actor")) for job in (text, frozen, whole)] == [4 * n for n in (1704, 1804, 2704)]
    first, second = (group_memory(job, H200, job.roles)["update of the actor"]["weights"] for job in (text, whole))
    assert second - first == 4 * 1000
