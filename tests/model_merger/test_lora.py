"""Adapters are merged with the scaling of the training run, or refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config

from tests.model_merger.layouts import load, with_adapters
from verl.model_merger.merge import MergeOptions, merge

ALPHA, RANK = 12.0, 3
ADAPTED = ("self_attn.q_proj", "mlp.down_proj")


def merged_by_hand(base: Path, scale: float) -> dict[str, torch.Tensor]:
    """W + scale * sum over k of B[:, k] A[k, :], in double precision."""
    adapted = with_adapters(load(base)).base_model.model.state_dict()
    expected = load_file(base / "model.safetensors")
    for layer in range(2):
        for module in ADAPTED:
            name = f"model.layers.{layer}.{module}"
            a, b = (adapted[f"{name}.lora_{x}.default.weight"].double() for x in "AB")
            change = sum(b[:, k, None] * a[None, k] for k in range(RANK))
            assert change.abs().max() > 0.01
            expected[f"{name}.weight"] = (expected[f"{name}.weight"].double() + scale * change).float()
    return expected


def assert_close(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    found = load_file(folder / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-7)


def record(actor: Path, **settings) -> None:
    """peft's adapter_config.json beside the shards."""
    (actor / "lora_adapter").mkdir(exist_ok=True)
    (actor / "lora_adapter" / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": RANK, **settings})
    )


@pytest.mark.parametrize("where", ["adapter_config.json", "lora_train_meta.json", "command line"])
def test_alpha_is_found_where_trainers_write_it(where, copied, made, tmp_path):
    actor = copied("lora") / "actor"
    options = {}
    if where == "adapter_config.json":
        record(actor, lora_alpha=ALPHA)
    elif where == "lora_train_meta.json":
        record(actor, lora_alpha=0)  # written by a faulty export; does not count
        (actor / where).write_text(json.dumps({"r": RANK, "lora_alpha": ALPHA, "task_type": "CAUSAL_LM"}))
    else:
        options = {"lora_alpha": ALPHA}
    merge(MergeOptions(actor, tmp_path / "merged", **options))
    assert_close(tmp_path / "merged", merged_by_hand(made / "base", ALPHA / RANK))


NOT_RECORDED = r"scaled by lora_alpha, and lora_alpha is not recorded in any of .*--lora_alpha N"


@pytest.mark.parametrize(
    ("settings", "options", "message"),
    [
        ({}, {}, NOT_RECORDED),
        ({"lora_alpha": 0}, {}, NOT_RECORDED),
        ({"lora_alpha": 16, "meta": 32}, {}, r"has different values: .*16.*32"),
        ({"lora_alpha": 16}, {"lora_alpha": -1}, "--lora_alpha: expected a positive number, found -1"),
        ({"lora_alpha": ALPHA, "use_dora": True}, {}, "the adapter is incomplete.*magnitude"),
        ({"lora_alpha": ALPHA, "target_modules": ["q_proj"]}, {}, "the adapter is incomplete.*down_proj"),
        (None, {"lora_alpha": 16}, "--lora_alpha is set, but the checkpoint contains no LoRA adapters"),
    ],
)
def test_nothing_is_guessed_or_ignored(settings, options, message, copied, tmp_path):
    actor = copied("fsdp2" if settings is None else "lora") / "actor"
    if settings is not None:
        record(actor, **settings)
    if settings and "meta" in settings:
        (actor / "lora_train_meta.json").write_text(json.dumps({"lora_alpha": settings["meta"]}))
    with pytest.raises(ValueError, match=message):
        merge(MergeOptions(actor, tmp_path / "merged", **options))


def test_rank_stabilized_adapters_are_divided_by_the_root_of_the_rank(copied, made, tmp_path):
    actor = copied("lora") / "actor"
    record(actor, lora_alpha=ALPHA, use_rslora=True)
    merge(MergeOptions(actor, tmp_path / "merged"))
    assert_close(tmp_path / "merged", merged_by_hand(made / "base", ALPHA / RANK**0.5))


def plain_checkpoint(actor: Path, model: torch.nn.Module, state: dict[str, torch.Tensor]) -> Path:
    (actor / "huggingface").mkdir(parents=True)
    model.config.save_pretrained(actor / "huggingface")
    torch.save(state, actor / "model_world_size_1_rank_0.pt")
    return actor


def test_untrained_adapters_are_written_with_a_warning(made, tmp_path, caplog):
    adapted = with_adapters(load(made / "base"))
    state = {name: torch.zeros_like(t) if "lora_B" in name else t for name, t in adapted.state_dict().items()}
    actor = plain_checkpoint(tmp_path / "actor", adapted.base_model.model, state)
    merge(MergeOptions(actor, tmp_path / "merged", lora_alpha=ALPHA))
    assert "all LoRA adapters are zero" in caplog.text
    assert (tmp_path / "merged" / "model.safetensors").is_file()


def test_weights_that_are_stored_transposed(tmp_path):
    """GPT-2 keeps (in, out); peft says so by fan_in_fan_out. c_proj is square: its shape would not tell."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(GPT2Config(vocab_size=11, n_embd=8, n_layer=1, n_head=2, n_positions=32))
    state = {f"base_model.model.{name}": tensor for name, tensor in model.state_dict().items()}
    inner = "base_model.model.transformer.h.0.attn.c_proj"
    state[f"{inner}.base_layer.weight"] = weight = state.pop(f"{inner}.weight")
    state[f"{inner}.base_layer.bias"] = state.pop(f"{inner}.bias")
    state[f"{inner}.lora_A.default.weight"] = a = torch.randn(2, 8)
    state[f"{inner}.lora_B.default.weight"] = b = torch.randn(8, 2)
    actor = plain_checkpoint(tmp_path / "actor", model, state)
    record(actor, lora_alpha=4, fan_in_fan_out=True, r=2)
    merge(MergeOptions(actor, tmp_path / "merged"))
    found = load_file(tmp_path / "merged" / "model.safetensors")["transformer.h.0.attn.c_proj.weight"]
    torch.testing.assert_close(found, weight + 2 * (b @ a).T)


def test_a_head_that_was_trained_whole_beside_adapters(made, tmp_path):
    model = load(made / "critic", "value")
    state = {f"base_model.model.{n}": t for n, t in with_adapters(model).base_model.model.state_dict().items()}
    head = torch.randn(1, 16)
    for part in ("weight", "bias"):
        old = state.pop(f"base_model.model.score.{part}")
        state[f"base_model.model.score.original_module.{part}"] = old
        state[f"base_model.model.score.modules_to_save.default.{part}"] = head if part == "weight" else old
    actor = plain_checkpoint(tmp_path / "critic", model, state)
    merge(MergeOptions(actor, tmp_path / "merged", lora_alpha=ALPHA))
    assert torch.equal(load_file(tmp_path / "merged" / "model.safetensors")["score.weight"], head)


def test_what_peft_saves_is_merged_as_peft_merges_it(made, tmp_path):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules="all-linear", init_lora_weights=False, use_rslora=True)
    model = peft.get_peft_model(load(made / "base"), config)
    actor = plain_checkpoint(tmp_path / "actor", model.base_model.model, model.state_dict())
    model.save_pretrained(actor / "lora_adapter")
    merge(MergeOptions(actor, tmp_path / "merged"))
    expected = model.merge_and_unload().state_dict()
    assert_close(tmp_path / "merged", {name: t for name, t in expected.items() if name != "lm_head.weight"})
