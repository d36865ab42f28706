"""Checkpoints of megatron-core in the layout of public verl: `dist_ckpt/` next to `huggingface/`."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen2Config, Qwen3MoeConfig

from verl.model_merger.__main__ import main

LAYERS, HEADS, GROUPS, SIZE, EXPERTS = 2, 4, 2, 8, 4
COMMON = {"vocab_size": 33, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS}
COMMON |= {"num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "max_position_embeddings": 64}
CONFIGS: dict[str, PretrainedConfig] = {
    "qwen2": Qwen2Config(**COMMON, tie_word_embeddings=True),
    "qwen3_moe": Qwen3MoeConfig(
        **COMMON, head_dim=SIZE, moe_intermediate_size=16, num_experts=EXPERTS, num_experts_per_tok=2
    ),
}


def fused_qkv(weights: dict[str, torch.Tensor], layer: int, kind: str) -> torch.Tensor:
    """For each key/value head: its query heads, the key head, the value head."""
    q, k, v = (weights[f"model.layers.{layer}.self_attn.{x}_proj.{kind}"] for x in "qkv")
    per_group = HEADS // GROUPS * SIZE
    parts = []
    for g in range(GROUPS):
        parts += [q[g * per_group : (g + 1) * per_group], k[g * SIZE : (g + 1) * SIZE], v[g * SIZE : (g + 1) * SIZE]]
    return torch.cat(parts)


def layer_of(weights: dict[str, torch.Tensor], i: int, kind: str) -> dict[str, torch.Tensor]:
    """The parameters of one layer with Megatron's names; norms as those of Transformer Engine."""
    prefix = f"model.layers.{i}."
    own = {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
    found = {
        "self_attention.linear_qkv.weight": fused_qkv(weights, i, "weight"),
        "self_attention.linear_qkv.layer_norm_weight": own["input_layernorm.weight"],
        "self_attention.linear_proj.weight": own["self_attn.o_proj.weight"],
    }
    if kind == "qwen2":
        gate_up = [own["mlp.gate_proj.weight"], own["mlp.up_proj.weight"]]
        return found | {
            "self_attention.linear_qkv.bias": fused_qkv(weights, i, "bias"),
            "mlp.linear_fc1.layer_norm_weight": own["post_attention_layernorm.weight"],
            "mlp.linear_fc1.weight": torch.cat(gate_up),
            "mlp.linear_fc2.weight": own["mlp.down_proj.weight"],
        }
    return found | {
        "self_attention.q_layernorm.weight": own["self_attn.q_norm.weight"],
        "self_attention.k_layernorm.weight": own["self_attn.k_norm.weight"],
        "pre_mlp_layernorm.weight": own["post_attention_layernorm.weight"],
        "mlp.router.weight": own["mlp.gate.weight"],
        "mlp.experts.experts.linear_fc1.weight": own["mlp.experts.gate_up_proj"],
        "mlp.experts.experts.linear_fc2.weight": own["mlp.experts.down_proj"],
    }


def with_keys_of_layers(layers: list[dict[str, torch.Tensor]], keys: str) -> dict[str, torch.Tensor]:
    if keys == "stacked":
        return {f"decoder.layers.{name}": torch.stack([each[name] for each in layers]) for name in layers[0]}
    found = {}
    for i, each in enumerate(layers):
        for name, tensor in each.items():
            prefix = f"decoder.layers.{i}."
            if ".experts.experts." in name:
                start, _, end = name.rpartition("experts.")
                for e, matrix in enumerate(tensor):
                    halves = dict(zip("wv", matrix.chunk(2))) if "fc1" in name else {"": matrix}
                    key = f"{prefix}{start}experts.{e}.{end}"
                    found |= {f"{key}_{half}" if half else key: part for half, part in halves.items()}
            else:
                found[prefix + name] = tensor
    return found


def write(folder: Path, kind: str, keys: str) -> dict[str, torch.Tensor]:
    """A checkpoint of a random model; returns its weights."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    model.config.save_pretrained(folder / "huggingface")
    weights = {name: p.detach() for name, p in model.named_parameters()}
    state = with_keys_of_layers([layer_of(weights, i, kind) for i in range(LAYERS)], keys)
    # a vocabulary of 33 entries is padded to be divided by ranks
    state["embedding.word_embeddings.weight"] = torch.cat([weights["model.embed_tokens.weight"], torch.ones(3, 32)])
    state["decoder.final_layernorm.weight"] = weights["model.norm.weight"]
    if kind != "qwen2":
        state["output_layer.weight"] = torch.cat([weights["lm_head.weight"], torch.ones(3, 32)])
    state["optimizer.state.exp_avg.decoder.final_layernorm.weight"] = torch.zeros(32)
    extra = {"decoder.layers.self_attention.core_attention._extra_state/shard_0_2": b""}
    dcp.save(state | extra, storage_writer=dcp.FileSystemWriter(folder / "dist_ckpt"), no_dist=True)
    (folder / "dist_ckpt" / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    return weights


@pytest.mark.parametrize(("kind", "keys"), [("qwen2", "stacked"), ("qwen3_moe", "stacked"), ("qwen3_moe", "apart")])
def test_the_public_layout_is_merged(kind, keys, tmp_path):
    weights = write(tmp_path / "actor", kind, keys)
    words = ["merge", "--backend", "megatron", "--local_dir", str(tmp_path / "actor"), "--tie-word-embedding"]
    assert main([*words, "--target_dir", str(tmp_path / "merged")]) == 0
    merged = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "merged").named_parameters())
    assert merged.keys() == weights.keys()
    assert all(torch.equal(merged[name], tensor) for name, tensor in weights.items())


def test_what_cannot_be_merged_is_refused(tmp_path, capsys):
    words = ["merge", "--backend", "megatron", "--local_dir", str(tmp_path / "actor")]
    words += ["--target_dir", str(tmp_path / "merged")]
    write(tmp_path / "actor", "qwen2", "stacked")
    CONFIGS["qwen3_moe"].save_pretrained(tmp_path / "actor" / "huggingface")
    assert main(words) == 1
    assert "it is not the model of config.json" in capsys.readouterr().err
    (tmp_path / "actor" / "dist_ckpt" / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    assert main(words) == 1
    assert "expected the format torch_dist, found zarr" in capsys.readouterr().err
    assert not (tmp_path / "merged").exists()
