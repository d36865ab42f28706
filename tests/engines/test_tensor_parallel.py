"""Tensor parallelism on real processes: loss, gradient, outputs and checkpoints of one device."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Phi3Config, PretrainedConfig, Qwen3Config

from tests.engines.ranks import (
    FLOAT64,
    OPTIMIZER,
    SIZES,
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
    train,
)
from verl.engines.base import MicroBatching
from verl.engines.parallel import planned_layers
from verl.model_merger.merge import MergeOptions, merge

TP = {"tensor_parallel_size": 2}
CONTENTS = ("model", "optimizer", "extra")
MODELS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False, attention_bias=True),
    "qwen2": qwen2(),  # biases, tied embeddings
    "qwen3": Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=True),  # norms of single heads
}


@pytest.mark.parametrize(
    ("model", "kind", "world", "sharding"),
    [
        ("llama", "causal_lm", 2, TP),
        ("qwen2", "value", 2, TP),
        ("qwen3", "causal_lm", 2, TP),
        pytest.param("llama", "value", 4, TP, marks=pytest.mark.slow),
        pytest.param("qwen2", "causal_lm", 4, TP | {"fsdp_size": 1}, marks=pytest.mark.slow),
        pytest.param("qwen3", "value", 4, TP | {"offload_policy": True}, marks=pytest.mark.slow),
        pytest.param("qwen3", "causal_lm", 4, TP | {"ulysses_sequence_parallel_size": 2}, marks=pytest.mark.slow),
    ],
)
def test_ranks_that_share_layers_give_the_numbers_of_one_device(model, kind, world, sharding, tmp_path):
    path = save_model(MODELS[model], tmp_path, kind)
    ranks = run_on_ranks(world, engine_on_rank, path, UNEVEN, kind=kind, **sharding, **FLOAT64)
    assert_same(ranks, engine_alone(path, kind=kind, **FLOAT64), atol=1e-9)
    dp_size = world // 2 // sharding.get("ulysses_sequence_parallel_size", 1)
    assert {rank["dp_rank"] for rank in ranks} == set(range(dp_size))


@pytest.mark.slow
def test_bf16_with_recomputed_layers_gives_the_numbers_of_sharding_alone(tmp_path):
    path = save_model(MODELS["qwen3"], tmp_path)
    mixed = {"dtype": "bf16", "enable_gradient_checkpointing": True}
    alone = engine_alone(path, **mixed)
    ranks = run_on_ranks(2, engine_on_rank, path, UNEVEN, **TP, **mixed)
    for rank in ranks:
        assert torch.allclose(rank["outputs"], alone["outputs"], atol=0.05)
        assert rank["metrics"]["grad_norm"] == pytest.approx(alone["metrics"]["grad_norm"], rel=0.05)


# ---- checkpoints ----------------------------------------------------------------------------------------------------


def train_and_save(path: str, sharding: dict, out: Path, resume: Path | None) -> dict:
    engine = make_engine(path, OPTIMIZER, sharded=True, **sharding, **FLOAT64)
    if resume:
        engine.load(resume, CONTENTS)
    found = results(engine, make_batch(), UNEVEN, steps=1)
    engine.save(out, CONTENTS, background=resume is None)
    engine.finish_save()
    return found


TWO, FOUR = (2, TP), (4, TP)


@pytest.mark.parametrize("stages", [[TWO, (2, {})], pytest.param([FOUR, TWO, FOUR], marks=pytest.mark.slow)])
def test_a_checkpoint_resumes_with_another_number_of_tensor_parallel_ranks_and_merges(stages, tmp_path):
    """One update on the ranks of each stage, and a last one on one device."""
    path = save_model(MODELS["qwen3"], tmp_path / "model")
    before = None
    for number, (world, sharding) in enumerate(stages):
        last = run_on_ranks(world, train_and_save, path, sharding, tmp_path / str(number), before)
        before = tmp_path / str(number)
        merged = merge(MergeOptions(before, tmp_path / f"merged {number}", base=path))
        exported = dict(AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float64).named_parameters())
        for name, value in last[0]["weights"].items():
            assert torch.equal(exported[name], value), name
    resumed, straight = (make_engine(path, OPTIMIZER, **FLOAT64) for _ in range(2))
    resumed.load(before, CONTENTS)
    train(resumed, make_batch(), MicroBatching(), steps=1)
    train(straight, make_batch(), MicroBatching(), steps=len(stages) + 1)
    for (name, found), (_, expected) in zip(resumed.weights(), straight.weights()):
        assert torch.allclose(found, expected, rtol=0, atol=1e-9), name


# ---- what is refused ------------------------------------------------------------------------------------------------


def trunk(config: PretrainedConfig) -> torch.nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config).base_model


def test_the_plan_names_every_matrix_of_a_block():
    assert planned_layers(trunk(MODELS["qwen3"]), "Qwen3")["layers.1.self_attn.q_norm"].startswith("replicated")
    layers = planned_layers(trunk(MODELS["llama"]), "Llama")
    assert len(layers) == 2 * 7 and layers["layers.0.mlp.down_proj"] == "rowwise"


def test_a_model_without_a_plan_or_with_another_kind_of_cut_is_refused_by_name():
    with pytest.raises(ValueError, match="GPT2LMHeadModel has no plan for tensor parallelism"):
        planned_layers(trunk(GPT2Config(n_layer=1, n_embd=32, n_head=2)), "GPT2LMHeadModel")
    phi = Phi3Config(**SIZES, pad_token_id=0)
    with pytest.raises(ValueError, match=r"shards layers\.0\.\S+, a Linear, as 'rowwise_split_input', which is not"):
        planned_layers(trunk(phi), "Phi3")


def test_a_parameter_of_a_block_that_the_plan_leaves_out_is_refused():
    incomplete = trunk(MODELS["qwen3"])
    plan = incomplete.config.base_model_tp_plan
    incomplete.config.base_model_tp_plan = {name: style for name, style in plan.items() if "k_norm" not in name}
    with pytest.raises(ValueError, match=r"does not say how layers\.0\.self_attn\.k_norm is sharded"):
        planned_layers(incomplete, "Qwen3")


def what_is_refused(path: str) -> list[str]:
    messages = []
    for keys in (
        {"tensor_parallel_size": 3},
        TP | {"ulysses_sequence_parallel_size": 2},
        TP | {"fsdp_size": 2},
        TP,
        TP | {"lora_rank": 2},
    ):
        with pytest.raises(ValueError) as error:
            make_engine(path, OPTIMIZER, sharded=True, **keys)
        messages.append(str(error.value))
    return messages


def test_sizes_that_do_not_fit_are_refused(tmp_path):
    path = save_model(qwen2(4, 1), tmp_path)
    for messages in run_on_ranks(2, what_is_refused, path):
        assert messages[0] == "tensor_parallel_size 3 does not divide the 2 ranks"
        assert messages[1].startswith("4 ranks would compute the same samples")
        assert messages[2].startswith("fsdp_size 2 does not divide the 1 ranks of a tensor-parallel share")
        assert messages[3] == "tensor_parallel_size 2 does not divide the model's num_key_value_heads 1"
        assert messages[4].startswith("LoRA is not supported with tensor parallelism")
