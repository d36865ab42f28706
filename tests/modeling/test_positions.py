"""Positions of prompts with images and videos: as transformers computes them, and by hand."""

import random

import pytest
import torch
from transformers import AutoModelForImageTextToText, Qwen2Config

from tests.vl_models import MERGE, QWEN, make_config, processor, random_image, video
from verl.modeling.positions import multimodal_positions, position_axes

IMAGE, VIDEO = "<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|><|video_pad|><|vision_end|>"


@pytest.mark.parametrize("family", QWEN)
def test_positions_equal_those_of_transformers_on_random_layouts(family):
    config, generator = make_config(family), random.Random(1)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config).model
    for _ in range(30):
        images, videos, text = [], [], ""
        for kind in generator.choices(("text", "image", "video"), k=generator.randint(1, 6)):
            if kind == "text":
                text += "x" * generator.randint(1, 9)
            elif kind == "image":
                text += IMAGE
                images.append(random_image(0, 8 * generator.randint(1, 4), 8 * generator.randint(1, 4)))
            else:  # not longer than wide: transformers 5 lets the text after a longer video overlap it
                text += VIDEO
                videos.append(video(0, 2 * generator.randint(1, 2), 8 * generator.randint(4, 6), 8))
        made = processor(family)(text, images, videos)
        ids = made["input_ids"]
        types = (ids == config.image_token_id).int() + 2 * (ids == config.video_token_id).int()
        grids = {name: made.get(name) for name in ("image_grid_thw", "video_grid_thw")}
        if family == "qwen2_5_vl" and videos:
            made["second_per_grid_ts"] = torch.tensor([generator.choice((0.5, 0.7, 1.0, 1.5)) for _ in videos])
            grids["second_per_grid_ts"] = made["second_per_grid_ts"]
        expected, delta = model.get_rope_index(ids, types, **grids)
        found = multimodal_positions(config, ids[0], made)
        assert torch.equal(found, expected[:, 0])
        assert found.max() + 1 - ids.numel() == delta.item()


def test_text_continues_after_a_long_video():
    # 3 frames of 1 x 1 tokens, one second apart, at 2 positions per second; then a token of text
    config = make_config("qwen2_5_vl")
    inputs = {"video_grid_thw": torch.tensor([[3, MERGE, MERGE]]), "second_per_grid_ts": [1.0]}
    found = multimodal_positions(config, torch.tensor([5, *[config.video_token_id] * 3, 6]), inputs)
    assert found.tolist() == [[0, 1, 3, 5, 6], [0, 1, 1, 1, 6], [0, 1, 1, 1, 6]]


def test_adjacent_images_are_separate():
    config = make_config("qwen2_vl")
    inputs = {"image_grid_thw": torch.tensor([[1, 2, 4], [1, 4, 2]])}
    found = multimodal_positions(config, torch.tensor([config.image_token_id] * 4), inputs)
    assert found.tolist() == [[0, 0, 2, 2], [0, 0, 2, 3], [0, 1, 2, 2]]


def test_one_axis_without_mrope():
    assert position_axes(make_config("gemma3")) == position_axes(Qwen2Config()) == 1
    assert multimodal_positions(make_config("gemma3"), torch.tensor([7, 8, 9]), None).tolist() == [[0, 1, 2]]


def test_placeholders_that_do_not_match_the_grids():
    config = make_config("qwen2_5_vl")
    image = config.image_token_id
    one = {"image_grid_thw": torch.tensor([[1, 4, 4]])}
    with pytest.raises(ValueError, match=r"expected 4 image tokens at token 1 of the prompt.*found 3"):
        multimodal_positions(config, torch.tensor([1, image, image, image, 2]), one)
    with pytest.raises(ValueError, match="expected 0 image tokens at token 5"):
        multimodal_positions(config, torch.tensor([1, *[image] * 4, image]), one)
    with pytest.raises(ValueError, match="placeholder tokens for every image"):
        multimodal_positions(config, torch.tensor([1, 2]), one)


def test_placeholder_tokens_that_are_text():
    config = make_config("qwen2_5_vl")
    image, one = config.image_token_id, {"image_grid_thw": torch.tensor([[1, 4, 4]])}
    text = multimodal_positions(config, torch.tensor([image, 1]), None)
    assert text.tolist() == [[0, 1]] * 3
    # an image of 2 x 2 tokens, and a turn of three tokens
    turns = multimodal_positions(config, torch.tensor([1, *[image] * 4, 2, image, 3]), one, continued=3)
    assert turns.tolist() == [[0, 1, 1, 1, 1, 3, 4, 5], [0, 1, 1, 2, 2, 3, 4, 5], [0, 1, 2, 1, 2, 3, 4, 5]]


def test_unknown_rule_of_positions():
    config = make_config("qwen2_vl")
    type(config).model_type, before = "other_vl", type(config).model_type
    try:
        with pytest.raises(ValueError, match="other_vl: multimodal positions"):
            position_axes(config)
    finally:
        type(config).model_type = before
