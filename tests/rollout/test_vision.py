"""Rollout of vision-language models: the log-probs of the responses are those of training."""

import dataclasses
import gc
import weakref
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText, LlavaConfig

from tests.engines.ranks import make_engine, qwen2, run_on_ranks, save_model
from tests.engines.test_vision import prompts
from tests.rollout.test_continuous import at_once
from tests.vl_models import FAMILIES, PLACEHOLDER, QWEN, processor, random_image, save_vl_model, tokenizer
from verl.config import schema
from verl.data.processor import load_processor
from verl.data.rlhf_dataset import RLHFDataset
from verl.data.sequences import build_sequences
from verl.data.tokenization import load_tokenizer
from verl.engines.base import MicroBatching
from verl.engines.parallel import init_process_group
from verl.modeling.vision import tower_of
from verl.protocol import DataProto
from verl.rollout.base import RolloutEnv, make_rollout_engine
from verl.rollout.native.vision import rotary_rows
from verl.rollout.request import Request, SamplingParams, media_of
from verl.rollout.vllm.settings import _vision_args
from verl.trainer.checks.models import ModelLimits


@pytest.fixture(scope="module")
def trainers(tmp_path_factory) -> dict[str, Any]:
    made: dict[str, Any] = {}

    def trainer(family: str):
        if family not in made:
            made[family] = make_engine(save_vl_model(family, tmp_path_factory.mktemp(family)))
        return made[family]

    return trainer


def requests(family: str, samples: int = 2, **params: Any) -> list[Request]:
    """`samples` requests for each prompt, with different limits."""
    found = []
    for i, (ids, inputs) in enumerate(prompts(family) * samples):
        sampling = SamplingParams(max_tokens=4 + i % 3, stop_token_ids=(0,), seed=5, **params)
        found.append(Request(ids, sampling, i, multi_modal_inputs=inputs))
    return found


def trained_log_probs(engine: Any, every: list[Request], answers: list[Any], temperature: float = 1.0) -> torch.Tensor:
    columns = build_sequences([r.prompt_ids for r in every], [a.token_ids for a in answers], pad_token_id=0)
    inputs = np.empty(len(every), dtype=object)
    inputs[:] = [request.multi_modal_inputs for request in every]
    batch = DataProto.from_dict(columns, {"multi_modal_inputs": inputs})
    return engine.infer(batch, ("log_probs",), MicroBatching(), temperature)["log_probs"]


def check(engine: Any, every: list[Request], answers: list[Any], temperature: float = 1.0, bound: float = 1e-4) -> None:
    """The log-probs of the answers are those of training."""
    expected = trained_log_probs(engine, every, answers, temperature)
    for row, answer in enumerate(answers):
        assert answer.log_probs == pytest.approx(expected[row, : len(answer.token_ids)].tolist(), abs=bound)


def make_rollout(name: str, engine: Any, **keys: Any):
    config = schema.RolloutConfig(name=name, prompt_length=100, response_length=8, **keys)
    env = RolloutEnv(
        rank=0, world_size=1, local_rank=0, device=engine.device, pad_token_id=0, compute_dtype=torch.float32
    )
    return make_rollout_engine(name, config, engine.spec.model, env, engine)


@pytest.mark.parametrize(("name", "family"), [(e, f) for e in ("hf", "native") for f in FAMILIES])
def test_log_probs_are_those_of_training(name, family, trainers):
    engine = trainers(family)
    rollout, every = make_rollout(name, engine, max_num_seqs=5), requests(family, temperature=0.8)
    answers = rollout.generate(every)
    check(engine, every, answers, 0.8)
    alone = rollout.generate([every[2]])[0]  # another batch, the same response
    assert alone.token_ids == answers[2].token_ids


@pytest.mark.skipif(not find_spec("vllm") or not find_spec("torchvision"), reason="needs vLLM and torchvision")
@pytest.mark.parametrize("family", [pytest.param(f, marks=[pytest.mark.slow] * (f != "qwen2_5_vl")) for f in QWEN])
def test_vllm_gives_the_log_probs_of_training_also_after_a_push(family, tmp_path):
    engine = make_engine(save_vl_model(family, tmp_path, head_dim=64))
    rollout, sign = make_rollout("vllm", engine, max_num_seqs=8), PLACEHOLDER[family]
    images, text = [random_image(0), random_image(1, 16, 16)], f"a{sign}b{sign}c"
    made = processor(family)(text, images)
    ids, raw = made.pop("input_ids")[0].tolist(), tokenizer(family).encode(text, add_special_tokens=False)
    params = SamplingParams(6, (0,), seed=1)
    media = {"multi_modal_data": {"images": images}, "multi_modal_inputs": made, "raw_prompt_ids": raw}
    every = [Request(ids, params, i, **media) for i in range(2)] + [Request([70, 71, 72], params, 5)]
    for version in (1, 2):
        rollout.receiver().receive(engine.rollout_weights(None), version)
        answers = rollout.generate(every)
        check(engine, every, answers)
        with torch.no_grad():  # features that vLLM kept would be stale
            for parameter in tower_of(engine.module)[1].parameters():
                parameter.mul_(0.8)
    with pytest.raises(ValueError, match="expected the columns multi_modal_data"):
        rollout.generate([Request(ids, params, 0, multi_modal_inputs=made)])


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("vllm") or not find_spec("torchvision"), reason="needs vLLM and torchvision")
@pytest.mark.parametrize("family", QWEN)
def test_vllm_places_the_frames_of_a_video_as_training_does(family, tmp_path):
    path = save_vl_model(family, tmp_path, head_dim=64)
    engine = make_engine(path)
    rollout = make_rollout("vllm", engine, max_num_seqs=8)
    rollout.receiver().receive(engine.rollout_weights(None), 1)
    model = schema.ModelConfig(path=path)
    tokens = load_tokenizer(model)
    video = {"video": [random_image(i, 24, 16) for i in range(8)], "fps": 4}
    row = {"prompt": "a<video>b<image>c", "answer": "1", "videos": [video], "images": [random_image(9)]}
    data = {"max_prompt_length": 100, "max_video_frames": 6}
    item = RLHFDataset([row], tokens, data, processor=load_processor(model, tokens))[0]
    every = [Request(item["prompt_ids"], SamplingParams(6, (0,), seed=1), i, **media_of(item)) for i in range(2)]
    answers = rollout.generate(every)
    check(engine, every, answers)


@pytest.mark.parametrize("family", ["qwen3_vl"])
def test_images_are_computed_once_for_all_samples_and_batches_admit_rows(family, trainers):
    engine = trainers(family)
    rollout, every, patches = make_rollout("native", engine, max_num_seqs=3), requests(family, 4), []
    hook = engine.model.vision.tower.register_forward_pre_hook(lambda module, args: patches.append(len(args[0])))
    together = make_rollout("native", engine).generate(every)
    hook.remove()
    inputs = [made for _, made in prompts(family) if made is not None]
    names = ("pixel_values", "pixel_values_videos")
    assert sum(patches) == sum(len(made[name]) for made in inputs for name in names if name in made)
    assert [a.token_ids for a in rollout.generate(every)] == [a.token_ids for a in together]
    one_by_one = at_once(make_rollout("native", engine), every)
    assert [a.token_ids for a in one_by_one] == [a.token_ids for a in together]


def test_images_of_responses_that_have_ended_are_not_kept(trainers):
    """A continuous batch may run as long as the training: pixels of its prompts would add up."""
    rollout, ids, given = make_rollout("native", trainers("qwen2_vl")), *prompts("qwen2_vl")[0]
    pixels = given["pixel_values"].clone()
    kept = weakref.ref(pixels)
    request = Request(ids, SamplingParams(2, (0,)), 0, multi_modal_inputs={**given, "pixel_values": pixels})
    del pixels
    assert rollout.generate([request]) and kept() is not None
    del request
    gc.collect()
    assert kept() is None


@pytest.mark.parametrize("copies", [1, 2])  # a column per frequency, or one for each of its two coordinates
def test_the_rotary_row_of_a_token_has_a_position_per_frequency(copies):
    positions = torch.tensor([[0, 1, 2, 5], [0, 1, 3, 5], [0, 1, 4, 6]])  # time, height and width of 4 tokens
    axes = [0, 2, 1]
    tables = tuple(torch.randn(7, 3).repeat(1, copies) for _ in range(2))
    for table, found in zip(tables, rotary_rows(tables, torch.tensor(axes), positions)):
        expected = [[table[positions[axis, token], f] for f, axis in enumerate(axes)] * copies for token in range(4)]
        assert found.tolist() == torch.tensor(expected).tolist()


def test_engines_refuse_models_and_images_by_name(trainers, tmp_path):
    llava = LlavaConfig(text_config=qwen2().to_dict(), vision_config={"model_type": "siglip_vision_model"})
    llava.architectures = ["LlavaForConditionalGeneration"]
    llava.save_pretrained(tmp_path / "llava")
    model = schema.ModelConfig(path=str(tmp_path / "llava"))
    env = RolloutEnv(0, 2, 0, torch.device("cpu"), 0, torch.float32, tp_rank=0, tp_size=2)
    split = schema.RolloutConfig(name="native", tensor_model_parallel_size=2)
    with pytest.raises(ValueError, match=r"tensor_model_parallel_size=2 is not supported for LlavaForConditional"):
        make_rollout_engine("native", split, model, env, None)
    with pytest.raises(ValueError, match=r"tensor_model_parallel_size=2 is not supported for LlavaForConditional"):
        ModelLimits.from_config(model).check_engine(split)
    text = make_engine(save_model(qwen2(), tmp_path))
    request = Request([1], SamplingParams(2, ()), 0, multi_modal_inputs={"pixel_values": torch.zeros(1)})
    for name in ("hf", "native"):
        with pytest.raises(ValueError, match=f"prompt 0: expected text, found images: rollout.name={name}"):
            make_rollout(name, text).generate([request])


@pytest.mark.skipif(find_spec("torchvision") is not None, reason="without torchvision")
def test_vllm_without_torchvision_is_refused():
    with pytest.raises(ValueError, match="vLLM reads images with torchvision, which is not installed: pip install"):
        _vision_args(())


def test_rows_with_images_continue_a_trajectory():
    columns = {"multi_modal_inputs": {"pixel_values": 1}, "multi_modal_data": {"images": [2]}, "raw_prompt_ids": [1, 2]}
    assert media_of(columns, [7]) == {**columns, "raw_prompt_ids": [1, 2, 7]}
    assert media_of({"multi_modal_inputs": None, "multi_modal_data": None, "raw_prompt_ids": [1]}) == {}
    assert media_of({}) == {}


@pytest.mark.parametrize(("name", "family"), [(e, f) for e in ("hf", "native") for f in FAMILIES])
def test_placeholder_tokens_of_earlier_turns_are_text(name, family, trainers):
    """A policy may sample an image token; in the next turn, it follows the prompt."""
    engine = trainers(family)
    rollout, turn = make_rollout(name, engine), [70, engine.module.config.image_token_id, 71]
    first = requests(family)
    later = [dataclasses.replace(r, prompt_ids=r.prompt_ids + turn, continued=len(turn)) for r in first]
    answers = rollout.generate(later)
    whole = [dataclasses.replace(a, token_ids=turn + a.token_ids) for a in answers]
    expected = trained_log_probs(engine, first, whole)[:, len(turn) :]
    for row, answer in enumerate(answers):
        assert answer.log_probs == pytest.approx(expected[row, : len(answer.token_ids)].tolist(), abs=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("family", QWEN)
def test_a_gpu_gives_the_log_probs_of_training(family, tmp_path):
    engine = make_engine(save_vl_model(family, tmp_path, head_dim=64), device="cuda", dtype="fp32")
    rollout, every = make_rollout("native", engine, max_num_seqs=5), requests(family, 3)
    answers = rollout.generate(every)
    check(engine, every, answers, bound=1e-3)


def on_two_ranks(paths: dict[str, str]) -> dict[str, Any]:
    """For `run_on_ranks`: what two ranks generate together, with the weights of the files and after a push."""
    init_process_group(torch.device("cpu"))
    rank, found = torch.distributed.get_rank(), {}
    section = schema.RolloutConfig(tensor_model_parallel_size=2, prompt_length=100, response_length=8, max_num_seqs=5)
    env = RolloutEnv(rank, 2, rank, torch.device("cpu"), 0, torch.float32, tp_rank=rank, tp_size=2)
    for family, path in paths.items():
        model, answers = schema.ModelConfig(path=path), []
        rollout = make_rollout_engine("native", section, model, env, None)
        trained = AutoModelForImageTextToText.from_pretrained(path)
        for version in (1, 2):
            if rank == 0:
                with rollout.leading():
                    answers.append(rollout.generate(requests(family, temperature=0.8)))
            else:
                rollout.follow()
            with torch.no_grad():
                for parameter in trained.parameters():
                    parameter.mul_(0.9)
            rollout.receiver().receive(trained.named_parameters(), version)
        found[family] = answers or sum(p.numel() for p in rollout.module.parameters())
    return found


@pytest.mark.parametrize(
    "families", [["qwen3_vl"], pytest.param([f for f in FAMILIES if f != "qwen3_vl"], marks=pytest.mark.slow)]
)
def test_two_ranks_generate_what_one_generates(families, tmp_path):
    paths = {family: save_vl_model(family, tmp_path / family) for family in families}
    leader, follower = run_on_ranks(2, on_two_ranks, paths)
    for family, path in paths.items():
        engine = make_engine(path)
        assert 0.5 < follower[family] / sum(p.numel() for p in engine.module.parameters()) < 0.9  # the tower is whole
        for answers in leader[family]:
            alone = make_rollout("native", engine).generate(requests(family, temperature=0.8))
            assert [a.token_ids for a in answers] == [a.token_ids for a in alone]
            check(engine, requests(family), answers, 0.8)
            with torch.no_grad():
                for parameter in engine.module.parameters():
                    parameter.mul_(0.9)
