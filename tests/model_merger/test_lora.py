"""Adapters are merged with the scaling of the training run, or refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config

from tests.model_merger.layouts import load
from verl.model_merger.merge import MergeOptions, merge

ALPHA, RANK = 12.0, 3
ADAPTED = ("self_attn.q_proj", "mlp.down_proj")


def matrices(base: Path) -> dict[str, torch.Tensor]:
    """lora_A and lora_B of two layers of every block, under peft's names."""
    torch.manual_seed(1)
    found = {}
    for name, weight in load_file(base / "model.safetensors").items():
        if name.removesuffix(".weight").endswith(ADAPTED):
            rows, columns = weight.shape
            prefix = f"base_model.model.{name.removesuffix('.weight')}"
            found[f"{prefix}.lora_A.weight"], found[f"{prefix}.lora_B.weight"] = (
                torch.randn(RANK, columns),
                torch.randn(rows, RANK),
            )
    assert len(found) == 8
    return found


def adapter_checkpoint(root: Path, base: Path, tensors: dict[str, torch.Tensor], **settings) -> Path:
    actor = root / "actor"
    load(base).config.save_pretrained(actor / "huggingface")
    (actor / "lora_adapter").mkdir()
    save_file(tensors, actor / "lora_adapter" / "adapter_model.safetensors")
    layers = sorted({name.split(".lora_")[0].removeprefix("base_model.model.") for name in tensors})
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "base_model_name_or_path": str(base),
        "target_modules": layers,
        **settings,
    }
    (actor / "lora_adapter" / "adapter_config.json").write_text(json.dumps(config))
    return actor


def merged_by_hand(base: Path, scale: float) -> dict[str, torch.Tensor]:
    """W + scale * sum over k of B[:, k] A[k, :], in double precision."""
    adapters, expected = matrices(base), load_file(base / "model.safetensors")
    for name in [name for name in adapters if name.endswith("lora_A.weight")]:
        a, b = adapters[name].double(), adapters[name.replace("lora_A", "lora_B")].double()
        change = sum(b[:, k, None] * a[None, k] for k in range(RANK))
        assert change.abs().max() > 0.01
        weight = name.removeprefix("base_model.model.").replace("lora_A.weight", "weight")
        expected[weight] = (expected[weight].double() + scale * change).float()
    return expected


def assert_close(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    found = load_file(folder / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("settings", "scale"), [({}, ALPHA / RANK), ({"use_rslora": True}, ALPHA / RANK**0.5)])
def test_the_scale_is_that_of_the_run(settings, scale, made, tmp_path):
    base = made / "base"
    actor = adapter_checkpoint(tmp_path, base, matrices(base), lora_alpha=ALPHA, **settings)
    merge(MergeOptions(actor, tmp_path / "merged"))
    assert_close(tmp_path / "merged", merged_by_hand(base, scale))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, r"adapter_config.json: expected the lora_alpha of the training run.* found None"),
        ({"lora_alpha": 0}, r"expected the lora_alpha of the training run.* found 0"),
        ({"lora_alpha": ALPHA, "use_dora": True}, "the adapter is incomplete.*magnitude"),
        ({"lora_alpha": ALPHA, "target_modules": ["q_proj"]}, "the adapter is incomplete.*down_proj"),
    ],
)
def test_nothing_is_guessed_or_ignored(settings, message, made, tmp_path):
    actor = adapter_checkpoint(tmp_path, made / "base", matrices(made / "base"), **settings)
    with pytest.raises(ValueError, match=message):
        merge(MergeOptions(actor, tmp_path / "merged"))


def test_untrained_adapters_are_written_with_a_warning(made, tmp_path, caplog):
    state = {name: torch.zeros_like(t) if "lora_B" in name else t for name, t in matrices(made / "base").items()}
    actor = adapter_checkpoint(tmp_path, made / "base", state, lora_alpha=ALPHA)
    merge(MergeOptions(actor, tmp_path / "merged"))
    assert "all LoRA adapters are zero" in caplog.text
    assert (tmp_path / "merged" / "model.safetensors").is_file()


def test_weights_that_are_stored_transposed(tmp_path):
    """GPT-2 keeps (in, out); peft says so by fan_in_fan_out. c_proj is square: its shape would not tell."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(GPT2Config(vocab_size=11, n_embd=8, n_layer=1, n_head=2, n_positions=32))
    model.save_pretrained(tmp_path / "base")
    inner = "transformer.h.0.attn.c_proj"
    a, b = torch.randn(2, 8), torch.randn(8, 2)
    state = {f"base_model.model.{inner}.lora_A.weight": a, f"base_model.model.{inner}.lora_B.weight": b}
    actor = adapter_checkpoint(tmp_path, tmp_path / "base", state, lora_alpha=4, fan_in_fan_out=True, r=2)
    merge(MergeOptions(actor, tmp_path / "merged"))
    found = load_file(tmp_path / "merged" / "model.safetensors")[f"{inner}.weight"]
    torch.testing.assert_close(found, model.get_parameter(f"{inner}.weight").detach() + 2 * (b @ a).T)
