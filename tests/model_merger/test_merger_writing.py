"""The target is as it was or whole and new, whatever happens in between."""

import json

import pytest
import torch

from verl.model_merger.merge import staged, write_config


def test_a_failure_leaves_the_target_as_it_was(tmp_path):
    target = tmp_path / "model"
    target.mkdir()
    (target / "model.safetensors").write_text("old")
    with pytest.raises(RuntimeError, match="disk"), staged(target) as folder:
        (folder / "model.safetensors").write_text("new")
        raise RuntimeError("disk")
    assert (target / "model.safetensors").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_leftovers_of_a_killed_process_are_removed(tmp_path):
    (tmp_path / ".model.merging").mkdir()
    (tmp_path / ".model.merging" / "model.safetensors").write_text("half")
    with staged(tmp_path / "model") as folder:
        assert list(folder.iterdir()) == []
        (folder / "model.safetensors").write_text("new")
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["model.safetensors"]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_the_config_is_changed_only_where_it_must_be(tmp_path):
    """Keys that this release of transformers would rename or drop stay: another release reads them."""
    (tmp_path / "out").mkdir()
    (tmp_path / "in").mkdir()
    config = {"architectures": ["LlamaForCausalLM"], "rope_theta": 5e5, "torch_dtype": "float32", "mine": [1, None]}
    (tmp_path / "in" / "config.json").write_text(json.dumps(config))
    (tmp_path / "in" / "model.safetensors").write_text("weights")
    write_config(tmp_path / "in", tmp_path / "out", "LlamaForCausalLM", torch.float32, None)
    assert (tmp_path / "out" / "config.json").read_text() == json.dumps(config)  # not a byte
    write_config(tmp_path / "in", tmp_path / "out", "LlamaForTokenClassification", torch.bfloat16, 1)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == config | {
        "architectures": ["LlamaForTokenClassification"],
        "torch_dtype": "bfloat16",
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
    }
    assert not (tmp_path / "out" / "model.safetensors").exists()
