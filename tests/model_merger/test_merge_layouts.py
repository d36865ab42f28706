"""Whatever wrote a checkpoint, its merge is the model that was trained, tensor by tensor."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer, Qwen3MoeConfig

from verl.model_merger.merge import MergeOptions, compare, merge

LAYOUTS = ["ours", "one device"]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        *((f"{layout}/actor", "trained") for layout in LAYOUTS),
        ("our value/critic", "critic"),
        ("moe/actor", "experts"),  # experts are split as on disk
    ],
)
def test_every_layout_merges_to_the_model_that_was_trained(layout, model, made, tmp_path):
    merge(MergeOptions(made / layout, tmp_path / "merged"))
    assert_same(tensors(tmp_path / "merged"), tensors(made / model))
    auto = AutoModelForTokenClassification if model == "critic" else AutoModelForCausalLM
    assert auto.from_pretrained(tmp_path / "merged").dtype == torch.float32
    assert compare(made / layout, made / model) == []
    if model == "trained":
        assert AutoTokenizer.from_pretrained(tmp_path / "merged")("abc=").input_ids
    if model == "critic":  # its config may say otherwise
        config = json.loads((tmp_path / "merged" / "config.json").read_text())
        assert config["architectures"] == ["Qwen2ForTokenClassification"] and len(config["id2label"]) == 1


def test_the_folder_in_the_checkpoint_gets_the_weights_that_it_lacks(copied, made, caplog):
    """As scripts for public verl have it: --local_dir .../actor --target_dir .../actor/huggingface."""
    actor = copied("ours") / "actor"
    files = {path.name: path.read_bytes() for path in (actor / "huggingface").iterdir()}
    merge(MergeOptions(actor, actor / "huggingface"))
    assert_same(tensors(actor / "huggingface"), tensors(made / "trained"))
    assert all((actor / "huggingface" / name).read_bytes() == content for name, content in files.items())
    assert AutoModelForCausalLM.from_pretrained(actor / "huggingface").dtype == torch.float32
    with caplog.at_level("INFO", "verl.model_merger"):
        merge(MergeOptions(actor, actor / "huggingface"))  # the manifest still holds
    assert "has the weights of the checkpoint already: nothing to merge" in caplog.text
    with pytest.raises(ValueError, match="whose weights --dtype bfloat16 would change: choose another folder"):
        merge(MergeOptions(actor, actor / "huggingface", dtype="bfloat16"))
    save_file(
        dict(tensors(made / "trained"), **{"lm_head.weight": torch.ones(2)}), actor / "huggingface/model.safetensors"
    )
    with pytest.raises(ValueError, match=r"has other weights than the checkpoint: lm_head\.weight"):
        merge(MergeOptions(actor, actor / "huggingface"))


def test_many_files_have_an_index(made, tmp_path):
    merge(MergeOptions(made / "ours" / "actor", tmp_path / "merged", max_shard_size=4000))
    files = sorted(path.name for path in (tmp_path / "merged").glob("*.safetensors"))
    assert len(files) > 3 and files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert_same(tensors(tmp_path / "merged"), tensors(made / "trained"))
    trained = AutoModelForCausalLM.from_pretrained(made / "trained").state_dict()
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict(), trained)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_another_dtype_is_the_rounded_model_and_config_says_so(dtype, made, tmp_path):
    merge(MergeOptions(made / "ours" / "actor", tmp_path / "merged", dtype=dtype))
    of = getattr(torch, dtype)
    assert_same(tensors(tmp_path / "merged"), {name: t.to(of) for name, t in tensors(made / "trained").items()})
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto").dtype == of
    assert compare(made / "ours" / "actor", tmp_path / "merged") == []


def test_only_weights_are_replaced_in_a_target_that_is_overwritten(made, tmp_path):
    target, kept = tmp_path / "merged", ("NOTES.md", "original/params.json")
    old = ("pytorch_model.bin", "model-00001-of-00002.safetensors", "model.safetensors.index.json")
    (target / "original").mkdir(parents=True)
    for name in (*kept, *old):
        (target / name).write_text("mine")
    with pytest.raises(
        ValueError, match="is not empty: choose another folder, or replace its weights with --overwrite"
    ):
        merge(MergeOptions(made / "ours" / "actor", target))
    merge(MergeOptions(made / "ours" / "actor", target, overwrite=True))
    assert all((target / name).read_text() == "mine" for name in kept)
    assert not any((target / name).exists() for name in old)
    assert_same(tensors(target), tensors(made / "trained"))


def test_stop_tokens_are_those_of_the_base_model(copied, made, tmp_path):
    actor = copied("ours") / "actor"
    (actor / "huggingface" / "generation_config.json").unlink()
    merge(MergeOptions(actor, tmp_path / "merged"))
    expected = (made / "base" / "generation_config.json").read_text()
    assert (tmp_path / "merged" / "generation_config.json").read_text() == expected


def test_a_mixture_of_experts_in_float64(tmp_path):
    """Grouped matmuls, by which transformers computes experts, have no float64."""
    sizes = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_key_value_heads": 2}
    model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**sizes, **experts), dtype=torch.float64)
    model.save_pretrained(tmp_path / "actor" / "huggingface")
    merge(MergeOptions(tmp_path / "actor", tmp_path / "merged"))
    assert_same(tensors(tmp_path / "merged"), tensors(tmp_path / "actor" / "huggingface"))
