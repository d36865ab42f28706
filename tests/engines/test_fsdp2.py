"""The sharded engine on real processes (gloo): the numbers of one device, on 1, 2 and 4 ranks."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from tests.engines.ranks import (
    OPTIMIZER,
    UNEVEN,
    assert_same,
    engine_alone,
    engine_on_rank,
    make_batch,
    make_engine,
    qwen2,
    results,
    run_on_ranks,
    save_model,
    share_of,
    train,
)
from verl.engines.base import MicroBatching

CONTENTS = ("model", "optimizer", "extra")


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    return save_model(qwen2(), tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    ("world", "sharding"),
    [
        (2, {}),
        (2, {"reshard_after_forward": False, "offload_policy": True}),
        pytest.param(4, {"fsdp_size": 2, "reshard_after_forward": False}, marks=pytest.mark.slow),
    ],
)
def test_ranks_give_the_numbers_of_one_device(world, sharding, path):
    assert_same(run_on_ranks(world, engine_on_rank, path, UNEVEN, **sharding), engine_alone(path))


def train_and_save(path: str, out: Path, resume: Path | None) -> dict:
    engine = make_engine(path, OPTIMIZER, sharded=True)
    if resume:
        engine.load(resume, CONTENTS)
    found = results(engine, make_batch(), UNEVEN)
    engine.save(out, (*CONTENTS, "hf_model"))
    return found


def test_a_checkpoint_of_two_ranks_resumes_on_one_and_is_a_huggingface_model(path, tmp_path):
    run_on_ranks(2, train_and_save, path, tmp_path / "two", None)
    (resumed,) = run_on_ranks(1, train_and_save, path, tmp_path / "one", tmp_path / "two")
    straight = make_engine(path, OPTIMIZER)
    train(straight, make_batch(), MicroBatching(), steps=4)
    for name, value in straight.weights():
        assert torch.allclose(resumed["weights"][name], value, rtol=1e-5, atol=5e-5), name
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "one" / "huggingface")
    for name, value in exported.named_parameters():
        assert torch.equal(value, resumed["weights"][name]), name


def save(path: str, kind: str, out: Path) -> None:
    make_engine(path, OPTIMIZER, sharded=True, kind=kind).save(out, CONTENTS)


@pytest.mark.parametrize("kind", ["causal_lm", "value"])
def test_the_huggingface_folder_beside_the_shards_describes_the_model_that_is_trained(kind, tmp_path):
    """A critic that starts from a language model is not one; a policy keeps the end tokens of its model."""
    start = save_model(qwen2(), tmp_path / "start")
    GenerationConfig(eos_token_id=[3, 5], do_sample=True, temperature=0.6).save_pretrained(start)
    run_on_ranks(1, save, start, kind, tmp_path)
    folder = tmp_path / "huggingface"
    config = json.loads((folder / "config.json").read_text())
    if kind == "value":
        assert config["architectures"] == ["Qwen2ForTokenClassification"] and len(config["id2label"]) == 1
        assert not (folder / "generation_config.json").exists()
    else:
        assert config["architectures"] == ["Qwen2ForCausalLM"]
        assert GenerationConfig.from_pretrained(folder).eos_token_id == [3, 5]


def weights_after_a_forward_pass(path: str) -> tuple[dict, set]:
    """The weights, and the dtypes of a norm's weight in the forward pass."""
    engine, dtypes = make_engine(path, OPTIMIZER, sharded=True, dtype="bf16", reshard_after_forward=False), set()
    norm = engine.module.get_submodule("model.layers.0.input_layernorm")
    norm.register_forward_pre_hook(lambda norm, inputs: dtypes.add(norm.weight.dtype))
    engine.infer(share_of(engine, make_batch()), ("log_probs",), UNEVEN)
    return dict(engine.weights()), dtypes


def test_weights_are_those_loaded_not_what_a_forward_pass_left_gathered(path):
    """Every rank gets them from the first, which alone read the files. A pass in bf16 gathers them in bf16, which is
    half of the bytes, and leaves no rounded copy."""
    expected = dict(AutoModelForCausalLM.from_pretrained(path).named_parameters())
    for weights, gathered in run_on_ranks(2, weights_after_a_forward_pass, path):
        assert gathered == {torch.bfloat16}
        assert weights.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(weights[name], value), name


def what_is_refused(path: str) -> list[str]:
    messages = []
    for keys in (
        {"fsdp_size": 3},
        {"ulysses_sequence_parallel_size": 3},
        {"use_remove_padding": False, "ulysses_sequence_parallel_size": 2},
    ):
        with pytest.raises(ValueError) as error:
            make_engine(path, OPTIMIZER, sharded=True, **keys)
        messages.append(str(error.value))
    return messages


def test_sizes_that_do_not_fit_are_refused(path):
    for messages in run_on_ranks(2, what_is_refused, path):
        assert messages[0] == "fsdp_size 3 does not divide the 2 ranks"
        assert messages[1] == "ulysses_sequence_parallel_size 3 does not divide the 2 ranks"
        assert "use_remove_padding" in messages[2]
