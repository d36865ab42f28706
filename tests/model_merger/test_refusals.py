"""Incomplete checkpoints, and results that are not the trained model, are refused; nothing is written."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from verl.checkpoints.store import CheckpointStore
from verl.model_merger.checkpoint import open_checkpoint
from verl.model_merger.huggingface import check_folder, checksums, describe, load
from verl.model_merger.merge import MergeOptions, compare, merge


def assert_refused(actor: Path, message: str, **options) -> None:
    target = actor.parent / "merged"
    with pytest.raises(ValueError, match=message):
        merge(MergeOptions(actor, target, **options))
    assert not target.exists() and not list(actor.parent.glob(".*"))


def change(actor: Path, edit) -> None:
    """Apply `edit` to the weights of one device."""
    file = actor / "huggingface" / "model.safetensors"
    save_file(edit(load_file(file)), file, metadata={"format": "pt"})


# ---- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model_world_size_2_rank_0.pt", "dist_ckpt"])
def test_checkpoints_of_public_verl_are_named(name, copied):
    actor = copied("ours") / "actor"
    shutil.rmtree(actor / "shards")
    (actor / name).write_bytes(b"")
    assert_refused(actor, rf"is a checkpoint of public verl, found {name}: merge it with the release that wrote it")


def test_missing_and_truncated_files_of_shards(copied):
    actor = copied("ours") / "actor"
    (file, other) = sorted((actor / "shards").glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-100])
    assert_refused(actor, rf"{file.name} is truncated")
    other.unlink()
    assert_refused(actor, rf"missing {other.name}; found 1 of 2 files")
    (actor / "shards" / ".metadata").unlink()
    assert_refused(actor, r"is not a complete checkpoint: cannot read .metadata")


def test_folders_of_another_kind(copied, made, tmp_path):
    root = copied("ours")
    assert_refused(tmp_path / "nowhere", r"no folder .*nowhere")
    assert_refused(root, r"is a checkpoint of all roles: give one role, .*/actor")
    assert_refused(root / "actor" / "huggingface", r"is not a checkpoint: expected shards/")
    for step in (7, 10, 9):
        (tmp_path / "run" / f"global_step_{step}" / "actor").mkdir(parents=True)
    assert_refused(tmp_path / "run", r"is a run: give the role of one checkpoint.*global_step_10/actor")
    shutil.copytree(made / "trained", tmp_path / "model")
    assert_refused(tmp_path / "model", r"is already a HuggingFace model: nothing to merge")
    shutil.rmtree(root / "actor" / "shards")
    assert_refused(root / "actor", r"contains no weights: the run saved without 'model'")


def test_a_target_that_would_lose_the_checkpoint_or_the_base_model(copied):
    root = copied("ours")
    for target in (root, root / "actor"):
        with pytest.raises(ValueError, match="contains the checkpoint itself"):
            merge(MergeOptions(root / "actor", target, overwrite=True))
    with pytest.raises(ValueError, match="is in the checkpoint, which must not change: choose another folder"):
        merge(MergeOptions(root / "actor", root / "actor" / "merged", overwrite=True))
    shutil.copytree(root / "actor" / "huggingface", root / "base")
    save_file({"weight": torch.ones(1)}, root / "base" / "model.safetensors")
    with pytest.raises(ValueError, match="is the base model: choose another folder"):
        merge(MergeOptions(root / "actor", root / "base", overwrite=True, base=str(root / "base")))


# ---- weights --------------------------------------------------------------------------------------------------------


def without(word):
    return lambda state: {name: tensor for name, tensor in state.items() if word not in name}


#: the change, message
CHANGED = {
    "missing": (without("q_proj.weight"), r"do not match Qwen2ForCausalLM .*missing: \S+0.self_attn.q_proj"),
    "shape": (lambda s: s | {"model.norm.weight": torch.ones(5)},
     r"model.norm.weight: expected shape \(16,\), found \(5,\)"),
    "unknown": (lambda s: s | {"v_head.weight": torch.ones(1, 16)}, r"not in the model: v_head.weight"),
    "nan": (lambda s: s | {"model.norm.weight": torch.full((16,), torch.nan)},
     r"model.norm.weight contains NaN or infinite values"),
    "tied": (lambda s: s | {"lm_head.weight": s["model.embed_tokens.weight"] + 1},
     r"lm_head.weight and model.embed_tokens.weight differ, but config.json ties them"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGED)
def test_changed_weights(name, copied):
    edit, message = CHANGED[name]
    actor = copied("one device") / "actor"
    change(actor, edit)
    assert_refused(actor, message)


# ---- a model that was not trained -----------------------------------------------------------------------------------


def test_the_base_model_again_is_written_with_a_warning(copied, made, tmp_path, caplog):
    actor = copied("one device") / "actor"
    base = load_file(made / "base" / "model.safetensors")
    change(actor, lambda state: {k: base[k] for k in state})
    merge(MergeOptions(actor, tmp_path / "allowed", allow_unchanged=True))
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    merge(MergeOptions(actor, tmp_path / "merged"))
    assert f"THE RESULT EQUALS THE BASE MODEL {made / 'base'}: training changed no weight" in caplog.text
    assert load_file(tmp_path / "merged" / "model.safetensors").keys() == base.keys()


def test_training_that_rounding_undoes_is_refused(copied, made, tmp_path):
    actor = copied("one device") / "actor"
    for folder in ("base", "rounded"):
        shutil.copytree(made / "base", tmp_path / folder)
    base = {name: t.bfloat16() for name, t in load_file(made / "base" / "model.safetensors").items()}
    save_file(base, tmp_path / "base" / "model.safetensors")
    change(actor, lambda state: {k: base[k].float() * (1 + 2**-12) for k in state})
    options = {"base": str(tmp_path / "base"), "dtype": "bfloat16"}
    assert_refused(actor, r"lost by rounding to torch.bfloat16 \(use --dtype float32\)", **options)
    merge(MergeOptions(actor, tmp_path / "kept", base=str(tmp_path / "base")))


def test_a_base_that_is_not_here(copied, caplog):
    actor = copied("one device") / "actor"
    assert_refused(actor, r"--base no/such: expected a folder with safetensors files", base="no/such")
    config = json.loads((actor / "huggingface" / "config.json").read_text())
    (actor / "huggingface" / "config.json").write_text(json.dumps(config | {"_name_or_path": "no/such"}))
    merge(MergeOptions(actor, actor.parent / "merged"))
    assert "not compared with the base model: ['no/such'] is not on this machine" in caplog.text


def test_compare_names_what_differs(made):
    faults = compare(made / "ours" / "actor", made / "base")
    assert len(faults) == 26 and faults[0].startswith("model.embed_tokens.weight differs by up to 0.0")
    faults = compare(made / "ours" / "actor", made / "critic")
    assert f"score.weight is only in {made / 'critic'}" in faults


# ---- a checkpoint of this project, with its manifest ----------------------------------------------------------------


@pytest.fixture
def saved(made, tmp_path) -> Path:
    """global_step_3 with an actor of two ranks and the configuration of the run."""
    with CheckpointStore(tmp_path / "run").writing(3) as folder:
        shutil.copytree(made / "ours" / "actor", folder / "actor")
        config = folder / "actor" / "huggingface" / "config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), "_name_or_path": None}))
        (folder / "actor" / "lora_adapter").mkdir()
        (folder / "actor" / "lora_adapter" / "adapter_model.safetensors").write_text("adapters")
        (folder / "critic").mkdir()
        (folder / "critic" / "extra.pt").write_text("x")
        (folder / "config.yaml").write_text(f"actor_rollout_ref:\n  model:\n    path: {made / 'trained'}\n")
    return tmp_path / "run" / "global_step_3"


def test_the_configuration_of_the_run_names_the_base_model(saved, tmp_path, caplog):
    merge(MergeOptions(saved / "actor", tmp_path / "merged"))
    assert re.search(r"EQUALS THE BASE MODEL .*/trained:", caplog.text)


@pytest.mark.parametrize("name", ["shards/__1_0.distcp", "lora_adapter/adapter_model.safetensors"])
def test_a_damaged_checkpoint_is_refused_by_its_manifest(name, saved):
    file = saved / "actor" / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert_refused(saved / "actor", rf"global_step_3 is damaged: actor/{name}: expected sha256 ")


# ---- the proof itself -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layout", "name"), [("ours", "model.norm.weight"), ("moe", "model.layers.1.mlp.experts.2")])
def test_a_wrong_merge_would_be_found(layout, name, made, tmp_path):
    """One value is off."""
    merge(MergeOptions(made / layout / "actor", tmp_path / "merged"))
    checkpoint = open_checkpoint(made / layout / "actor")
    model = describe(checkpoint.config_folder, checkpoint.source.names(), False)
    expected = model, torch.float32, checksums(load(checkpoint.source, model, None))
    check_folder(tmp_path / "merged", *expected)
    file = tmp_path / "merged" / "model.safetensors"
    weights = load_file(file)
    weights[name if name in weights else f"{name}.up_proj.weight"].view(-1)[3] += 1e-4
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(
        ValueError, match=r"(norm.weight|experts.gate_up_proj) of the merged model differs from the checkpoint"
    ):
        check_folder(tmp_path / "merged", *expected)


def test_a_missing_folder_names_the_checkpoints_that_exist(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for time, name in enumerate(("other/global_step_20", "gsm8k/ppo-qwen2/global_step_3")):
        actor = tmp_path / "checkpoints" / name / "actor"
        actor.mkdir(parents=True)
        os.utime(actor, (time, time))
    missing = tmp_path / "checkpoints/verl_examples/gsm8k/global_step_410/actor"
    assert_refused(
        missing,
        r"no folder .* checkpoints/other/global_step_20/actor, checkpoints/gsm8k/ppo-qwen2/global_step_3/actor$",
    )
