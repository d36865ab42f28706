"""Images and videos for SGLang: what its scheduler gets, and with SGLang that log-probs are those of training.

Tests of `real` need SGLang: make test-sglang.
"""

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.engines.ranks import make_engine
from tests.engines.test_vision import prompts
from tests.rollout.test_vision import make_rollout, trained_log_probs
from tests.vl_models import PLACEHOLDER, QWEN, make_config, processor, random_image, save_vl_model, video
from verl.modeling.positions import multimodal_positions
from verl.rollout.base import Request, SamplingParams
from verl.rollout.sglang.engine import SglangRollout, arguments_of
from verl.rollout.sglang.images import MediaReader
from verl.rollout.sglang.service import Job

real = pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed")
GREEDY = SamplingParams(6, (0,), temperature=0.0)


def request(family: str, text: str, images: list, videos: list = (), params: SamplingParams = GREEDY, i: int = 0):
    """A request whose prompt has `text`, in which I is an image and V a video."""
    sign = PLACEHOLDER[family]
    made = processor(family)(text.replace("I", sign).replace("V", sign.replace("image", "video")), images, videos)
    ids = made.pop("input_ids")[0].tolist()
    return Request(ids, params, i, multi_modal_inputs=made)


# ---- what the scheduler gets ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", QWEN)
def test_items_are_at_their_placeholders_with_the_positions_of_training(family):
    config, frames = make_config(family), 2  # of 4 pictures, two of which are one patch
    asked = request(family, "aIbVcId", [random_image(0), random_image(1, 16, 16)], [video()])
    found = MediaReader(config).read(asked.prompt_ids, asked.multi_modal_inputs)
    assert [item.kind for item in found.items] == ["image", "video", "image"]
    tokens = {"image": config.image_token_id, "video": config.video_token_id}
    inside = [range(first, last + 1) for item in found.items for first, last in item.spans]
    covered = {t: item.kind for item in found.items for first, last in item.spans for t in range(first, last + 1)}
    assert covered == {t: k for k, token in tokens.items() for t, id in enumerate(asked.prompt_ids) if id == token}
    assert len(inside) == 2 + (frames if family == "qwen3_vl" else 1)
    for item in found.items:
        assert len(item.pixels) == item.grid.prod() == 4 * sum(last + 1 - first for first, last in item.spans)
    pixels = asked.multi_modal_inputs["pixel_values"]
    assert torch.equal(torch.cat([found.items[0].pixels, found.items[2].pixels]), pixels)
    expected = multimodal_positions(config, torch.tensor(asked.prompt_ids), asked.multi_modal_inputs)
    assert torch.equal(found.positions, expected)
    assert found.offset == expected.max() + 1 - len(asked.prompt_ids)


def test_positions_of_sampled_tokens_and_of_a_prompt_that_ends_with_an_image():
    config, asked = make_config("qwen3_vl"), request("qwen3_vl", "aI", [random_image(0, 16, 32)])
    reader, inputs = MediaReader(config), asked.multi_modal_inputs
    found = reader.read(asked.prompt_ids, inputs, sampled=2)
    # 1 token of text, the mark, an image of 4 x 2 tokens, the mark, and two sampled tokens
    assert found.positions[:, -3:].tolist() == [[6, 7, 8]] * 3 and found.positions.shape[1] == 1 + 1 + 8 + 1 + 2
    without_mark = reader.read(asked.prompt_ids[:-1], inputs)
    assert without_mark.positions[:, -2:].tolist() == [[2, 6], [5, 6], [3, 6]]
    assert without_mark.offset == 6 - 10


def test_digests_are_those_of_pixels_and_grid():
    reader, blank = MediaReader(make_config("qwen2_vl")), torch.zeros(16, 3 * 2 * 16)
    config = reader.config

    def digest(pixels: torch.Tensor, grid: list[int]) -> int:
        ids = [5, *[config.image_token_id] * 4, 6]
        inputs = {"pixel_values": pixels, "image_grid_thw": torch.tensor([grid])}
        return reader.read(ids, inputs).items[0].digest

    assert digest(blank, [1, 4, 4]) == digest(blank.clone(), [1, 4, 4])
    assert digest(blank.clone(), [1, 4, 4]) != digest(blank.clone(), [1, 2, 8])
    assert digest(blank + 1, [1, 4, 4]) != digest(blank.clone(), [1, 4, 4])


def test_arguments_of_a_request_with_images():
    asked = request("qwen2_5_vl", "aIb", [random_image(0)])
    job = Job(asked, token_ids=[7, 8])
    found = arguments_of(job, media=MediaReader(make_config("qwen2_5_vl")))
    assert found["input_ids"] == [*asked.prompt_ids, 7, 8]
    (media,) = found["image_data"]
    assert media.positions.shape == (3, len(asked.prompt_ids) + 2) and len(media.items) == 1
    assert "image_data" not in arguments_of(Job(Request([1], GREEDY, 0)))


def test_images_without_tensors_are_refused():
    engine = SglangRollout(SimpleNamespace(experts=None), None, None, vocab_size=9, max_length=9, reads_images=True)
    asked = Request([1], SamplingParams(2, ()), 0, multi_modal_data={"images": [random_image()]}, raw_prompt_ids=[1])
    with pytest.raises(ValueError, match=r"prompt 0: expected the column multi_modal_inputs .* let the dataset run"):
        engine._check("prompt 0", asked)


# ---- with SGLang ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=QWEN)
def made(request, tmp_path_factory) -> Any:
    """Family, training engine and rollout engine, whose weights have been pushed."""
    trainer = make_engine(save_vl_model(request.param, tmp_path_factory.mktemp(request.param), head_dim=32))
    # prompts of more than 24 tokens are computed in chunks
    rollout = make_rollout("sglang", trainer, max_num_seqs=8, max_num_batched_tokens=24)
    rollout.receiver().receive(trainer.rollout_weights(None), 1)
    yield request.param, trainer, rollout
    rollout.service.engine.shutdown()


def assert_trained(trainer: Any, every: list[Request], answers: list[Any]) -> None:
    expected = trained_log_probs(trainer, every, answers)
    for row, answer in enumerate(answers):
        assert answer.log_probs == pytest.approx(expected[row, : len(answer.token_ids)].tolist(), abs=1e-4)


def sampled(family: str) -> list[Request]:
    """Two samples of each prompt: several images, text, one image, and a video."""
    params = SamplingParams(6, (0,), seed=1)
    return [
        Request(ids, params, i, multi_modal_inputs=inputs) for i, (ids, inputs) in enumerate(prompts(family) * 2)
    ]


@real
def test_log_probs_are_those_of_training(made):
    family, trainer, rollout = made
    every = sampled(family)
    assert_trained(trainer, every, rollout.generate(every))
