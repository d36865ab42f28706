"""Images and videos for SGLang: what its scheduler gets, and with SGLang that log-probs are those of training.

Tests of `real` need SGLang: make test-sglang.
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import LlamaConfig

from tests.engines.ranks import make_engine
from tests.rollout.test_vision import make_rollout, trained_log_probs
from tests.vl_models import PLACEHOLDER, QWEN, make_config, processor, random_image, save_vl_model, video
from verl.config import schema
from verl.modeling.positions import multimodal_positions
from verl.modeling.vision import tower_of
from verl.rollout.engine_copy import EngineCopy
from verl.rollout.request import Request, SamplingParams
from verl.rollout.sglang import images
from verl.rollout.sglang.engine import SglangRollout, arguments_of
from verl.rollout.sglang.images import MediaReader
from verl.rollout.sglang.service import Job

real = pytest.mark.skipif(not find_spec("sglang") or not find_spec("torchvision"), reason="make test-sglang")
#: pixels of a patch; SGLang's Qwen2.5-VL reads others as features
PATCHES = {"qwen2_5_vl": 14}
GREEDY = SamplingParams(6, (0,), temperature=0.0)


def request(family: str, text: str, images: list, videos: Sequence[torch.Tensor] = (), patch: int = 4) -> Request:
    """A request whose prompt has `text`, in which I is an image and V a video."""
    sign = PLACEHOLDER[family]
    text = text.replace("I", sign).replace("V", sign.replace("image", "video"))
    made = processor(family, patch)(text, images, videos)
    ids = made.pop("input_ids")[0].tolist()
    return Request(ids, GREEDY, 0, multi_modal_inputs=made or None)


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


def test_requests_that_are_refused():
    config = schema.RolloutConfig(name="sglang", max_model_len=99)
    copy = EngineCopy(config, None, make_config("qwen2_5_vl"), None, is_trained=True)
    engine = SglangRollout(copy, None, None, None, MediaReader(copy.hf_config))
    asked = Request([1], GREEDY, 0, multi_modal_data={"images": [random_image()]}, raw_prompt_ids=[1])
    with pytest.raises(ValueError, match=r"prompt 0: expected the column multi_modal_inputs .* let the dataset run"):
        engine.check("prompt 0", asked)
    with pytest.raises(ValueError, match=r"prompt 1: expected images, found videos: .*native, hf or vllm"):
        engine.check("prompt 1", request("qwen2_5_vl", "aVb", [], [video()]))
    engine.check("prompt 2", request("qwen2_5_vl", "aIb", [random_image()]))
    text = SglangRollout(replace(copy, hf_config=LlamaConfig(vocab_size=272)), None, None, None)
    with pytest.raises(ValueError, match=r"prompt 3: expected text, found images: rollout\.name=sglang"):
        text.check("prompt 3", request("qwen2_5_vl", "aIb", [random_image()]))


def test_models_that_are_refused(monkeypatch):
    monkeypatch.setattr(images, "find_spec", lambda name: object())
    for family in QWEN:
        images.check_model(make_config(family, patch=14))
    with pytest.raises(ValueError, match=r"expected patches of 1176 values .* found 96: .* use rollout\.name=native"):
        images.check_model(make_config("qwen2_5_vl"))
    monkeypatch.setattr(images, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="torchvision, which is not installed: pip install torchvision"):
        images.check_model(make_config("qwen2_vl"))


# ---- with SGLang ----------------------------------------------------------------------------------------------------


@dataclass
class Setup:
    """A training engine, and a rollout engine to which its weights have been pushed."""

    family: str
    trainer: Any
    rollout: Any
    version: int = 0

    def push(self) -> None:
        self.version += 1
        self.rollout.receiver().receive(self.trainer.rollout_weights(None), self.version)

    def requests(self, **params: Any) -> list[Request]:
        """Three samples of prompts with two images, text, one image, and two empty images of other sides."""
        patch = PATCHES.get(self.family, 4)
        side = 4 * patch
        empty = [Image.new("RGB", (side, side)), Image.new("RGB", (side // 2, side * 2))]
        made = [
            request(self.family, "aIbIc", [random_image(0, side, side), random_image(1, side, side // 2)], patch=patch),
            request(self.family, "def", [], patch=patch),
            request(self.family, "Ig", [random_image(2, side * 2, side)], patch=patch),
            *(request(self.family, "hIj", [image], patch=patch) for image in empty),
        ]
        sampling = SamplingParams(6, (0,), seed=1, **params)
        return [replace(each, params=sampling, sample_id=i) for i, each in enumerate(made * 3)]

    def assert_trained(self, every: list[Request], answers: list[Any], temperature: float = 1.0) -> None:
        expected = trained_log_probs(self.trainer, every, answers, temperature)
        for row, answer in enumerate(answers):
            assert answer.log_probs == pytest.approx(expected[row, : len(answer.token_ids)].tolist(), abs=1e-4)

    @contextmanager
    def other_tower(self) -> Iterator[None]:
        """The trainer has other weights of its vision tower."""
        tower = tower_of(self.trainer.module)[1]
        with torch.no_grad():
            before = [parameter.clone() for parameter in tower.parameters()]
            for parameter in tower.parameters():
                parameter.mul_(0.5)
            yield
            for parameter, values in zip(tower.parameters(), before):
                parameter.copy_(values)


@pytest.fixture(scope="module", params=QWEN)
def made(request, tmp_path_factory) -> Iterator[Setup]:
    folder, patch = tmp_path_factory.mktemp(request.param), PATCHES.get(request.param, 4)
    tied = {"tie_word_embeddings": True} if request.param == "qwen2_vl" else {}
    trainer = make_engine(save_vl_model(request.param, folder, head_dim=32, patch=patch, **tied))
    # the prompts of a batch are computed in chunks of 24 tokens
    rollout = make_rollout("sglang", trainer, max_num_seqs=8, max_num_batched_tokens=24)
    setup = Setup(request.param, trainer, rollout)
    try:
        setup.push()
        yield setup
    finally:
        rollout.service.engine.shutdown()


@real
def test_log_probs_are_those_of_training(made):
    every = made.requests(temperature=0.8)
    made.assert_trained(every, made.rollout.generate(every), 0.8)


@real
def test_log_probs_of_prompts_with_videos(made):
    if made.family == "qwen2_5_vl":
        pytest.skip("refused")
    asked = request(made.family, "VIgVh", [random_image(2, 8, 16)], [video(1, 4, 16, 16), video(2, 2, 8, 16)])
    every = [replace(asked, params=replace(GREEDY, temperature=1.0), sample_id=i) for i in range(3)]
    made.assert_trained(every, made.rollout.generate(every))


@real
def test_greedy_tokens_are_those_of_hf(made):
    every = made.requests(temperature=0.0)
    expected = make_rollout("hf", made.trainer).generate(every)
    assert [a.token_ids for a in made.rollout.generate(every)] == [a.token_ids for a in expected]


@real
def test_features_of_images_do_not_survive_a_push(made):
    every = made.requests()
    made.rollout.generate(every)
    with made.other_tower():
        made.push()
        answers = made.rollout.generate(every)
        made.assert_trained(every, answers)
        before = made.requests()
    with pytest.raises(AssertionError):  # the weights before
        made.assert_trained(before, answers)
    made.push()


@real
def test_a_push_during_a_response(made):
    first, text, *_ = made.requests(temperature=0.0)
    asked = replace(first, params=replace(first.params, max_tokens=90, stop_token_ids=()))

    async def run() -> Any:
        task = asyncio.create_task(made.rollout.generate_one(asked))
        await made.rollout.generate_one(text)
        made.push()
        return await task

    with made.other_tower():
        answer = asyncio.run(run())
        ((_, old), (start, new)) = answer.weight_versions
        expected = trained_log_probs(made.trainer, [asked], [answer])[0].tolist()
        assert (old, new) == (made.version - 1, made.version) and 0 < start < 90
        assert answer.log_probs[start:] == pytest.approx(expected[start:], abs=1e-4)
        assert answer.log_probs[:start] != pytest.approx(expected[:start], abs=1e-4)
    assert answer.log_probs[:start] == pytest.approx(
        trained_log_probs(made.trainer, [asked], [answer])[0, :start].tolist(), abs=1e-4
    )
    made.push()
