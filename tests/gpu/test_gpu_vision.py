"""Prompts with images in the native engine on a GPU: the log-probs of transformers' forward pass."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from tests.vl_models import PLACEHOLDER, processor, random_image, save_vl_model, video
from verl.rollout.native.engine import NativeRollout
from verl.rollout.request import Completion, Request, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE = "cuda"
FAMILIES = ("qwen2_5_vl", "qwen3_vl", "gemma3")


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> dict[str, str]:
    return {family: save_vl_model(family, tmp_path_factory.mktemp(family)) for family in FAMILIES}


def model(path: str, dtype: torch.dtype) -> torch.nn.Module:
    return AutoModelForImageTextToText.from_pretrained(path, dtype=dtype).to(DEVICE).eval()


def requests(family: str, samples: int, **params: Any) -> list[Request]:
    """Prompts with two images, three that pass the end of a block of 64 tokens, none, and a video with an image."""
    sign, made = PLACEHOLDER[family], processor(family)
    images = [random_image(i, 32, 24) for i in range(5)]
    every = [
        made(f"a{sign}b{sign}", images[:2]),
        made(f"Some text {sign} between {sign} the images {sign} to count.", images[2:]),
        made("cde"),
    ]
    if family != "gemma3":
        every.append(made(sign.replace("image", "video") + sign, [random_image(9)], [video()]))
    assert family == "gemma3" or {len(tensors["input_ids"][0]) > 64 for tensors in every} == {True, False}
    found = []
    for tensors in every:
        rest = {name: values for name, values in tensors.items() if name not in ("input_ids", "token_type_ids")}
        found += [(tensors["input_ids"][0].tolist(), rest or None)] * samples
    return [
        Request(ids, SamplingParams(20 + i % 30, (), seed=7, **params), i, multi_modal_inputs=inputs)
        for i, (ids, inputs) in enumerate(found)
    ]


def log_probs(module: torch.nn.Module, request: Request, completion: Completion) -> torch.Tensor:
    """Of transformers' own forward pass over prompt and response, with its own positions and placement."""
    ids, prompt = torch.tensor([request.prompt_ids + completion.token_ids]), len(request.prompt_ids)
    types = (ids == module.config.image_token_id).int()
    if module.config.model_type != "gemma3":
        types += 2 * (ids == module.config.video_token_id).int()
    types[:, prompt:] = 0
    name = "token_type_ids" if module.config.model_type == "gemma3" else "mm_token_type_ids"
    given = {name: types, **(request.multi_modal_inputs or {})}
    given = {name: values.to(DEVICE) for name, values in given.items()}
    with torch.no_grad():
        logits = module(ids.to(DEVICE), **given).logits[0, prompt - 1 : -1]
    chosen = torch.tensor(completion.token_ids, device=DEVICE)
    return logits.double().log_softmax(-1).gather(1, chosen[:, None])[:, 0].cpu()


def gaps(module: torch.nn.Module, every: list[Request], found: list[Completion]) -> torch.Tensor:
    """Absolute differences of log-probs. Responses with a sampled placeholder, which transformers rejects, are left."""
    special = {module.config.image_token_id, getattr(module.config, "video_token_id", None)}
    pairs = [(r, c) for r, c in zip(every, found) if not special & set(c.token_ids)]
    assert len(pairs) > len(every) / 2
    return torch.cat([(torch.tensor(c.log_probs) - log_probs(module, r, c)).abs() for r, c in pairs])


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_are_those_of_transformers(paths, family, graphs):
    module, every = model(paths[family], torch.float32), requests(family, 3)
    engine = NativeRollout(module, graphs=graphs)
    found = engine.generate(every)
    assert gaps(model(paths[family], torch.float32), every, found).max() < 1e-4
    alone = NativeRollout(module, graphs=graphs).generate([every[4]])[0]
    assert alone.token_ids == found[4].token_ids
    again = engine.generate(every)  # by the captured graphs
    assert [c.token_ids for c in again] == [c.token_ids for c in found]


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_log_probs_are_near_the_forward_pass(paths, family):
    module, every = model(paths[family], torch.bfloat16), requests(family, 3)
    found = NativeRollout(module).generate(every)
    near = gaps(model(paths[family], torch.bfloat16), every, found).mean()
    others = [Request(r.prompt_ids, r.params, r.sample_id, multi_modal_inputs=_negative(r)) for r in every]
    assert near < 0.08, "these tiny models have steep logits: 0.01 to 0.03 on a CPU"
    assert gaps(module, others, found).mean() > 0.2  # what other images would give


def _negative(request: Request) -> dict[str, Any] | None:
    """The tensors of a request with inverted pixels."""
    inputs = request.multi_modal_inputs
    return inputs and {name: -values if "pixel" in name else values for name, values in inputs.items()}
