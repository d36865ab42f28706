"""Attention of vision towers: the numbers of the tower's default, with fewer calls."""

import pytest
import torch
from transformers import AutoModelForImageTextToText

from tests.vl_models import QWEN, make_config, processor, random_image
from verl.modeling import attention

SIGN = "<|vision_start|><|image_pad|><|vision_end|>"


@pytest.mark.parametrize("family", QWEN)
def test_features_and_gradients_equal_the_default(family, monkeypatch):
    made = processor(family)(SIGN * 3, [random_image(0, 24, 40), random_image(1, 16, 16), random_image(2, 24, 40)])
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(make_config(family)).double()
    calls, found = [], {}
    plain = attention.scaled_dot_product_attention
    monkeypatch.setattr(attention, "scaled_dot_product_attention", lambda *a, **k: calls.append(1) or plain(*a, **k))
    for name in ("eager", attention.VISION_NAME):
        model.set_attn_implementation({"vision_config": name})
        model.zero_grad()
        tower = model.model.visual
        out = tower(made["pixel_values"].double(), grid_thw=made["image_grid_thw"], return_dict=True).pooler_output
        out.square().sum().backward()
        found[name] = [out.detach(), *(p.grad.clone() for p in tower.parameters() if p.grad is not None)]
    for default, ours in zip(*found.values(), strict=True):
        assert torch.allclose(default, ours, rtol=1e-6, atol=1e-7)  # the softmax of "eager" is in float32
    # two lengths in a layer with full attention; the windows of Qwen2.5-VL have up to four
    assert len(calls) <= 2 * 4
