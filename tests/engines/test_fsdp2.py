"""The sharded engine on real processes (gloo): the numbers of one device, whatever ranks share, and checkpoints."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GenerationConfig,
    GPT2Config,
    LlamaConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from tests.engines import ranks
from tests.engines.ranks import (
    FLOAT64,
    OPTIMIZER,
    SIZES,
    UNEVEN,
    make_batch,
    make_engine,
    qwen2,
    run_on_ranks,
    save_model,
    share_of,
    train,
)
from verl.engines import sharding as engine_sharding
from verl.engines.base import MicroBatching
from verl.engines.parallel import planned_layers, sharded_layers
from verl.model_merger.merge import MergeOptions, merge
from verl.modeling.sequence_parallel import check_heads

CONTENTS = ("model", "optimizer", "extra")
TP, SP = {"tensor_parallel_size": 2}, {"ulysses_sequence_parallel_size": 2}
EP, FUSED = {"expert_parallel_size": 2}, {"kernels": "fused"}
NINE = MicroBatching(tokens=9)
MODELS: dict[str, PretrainedConfig] = ranks.MIXTURES | {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False, attention_bias=True),
    "qwen2": qwen2(),  # biases, tied embeddings
    "qwen3": Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=True),  # norms of single heads
    "1 of 4 heads": qwen2(4, 1),
    "3 of 6 heads": qwen2(6, 3),
    # soft-capped scores, and a window in every other layer
    "gemma2": Gemma2Config(**SIZES, head_dim=8, sliding_window=4, query_pre_attn_scalar=8),
}
MODELS["3 of 6 heads"].hidden_size = 48

#: model, micro-batches, keys of the model, keys of the layout
VALUE = {"kind": "value"}
ON_2_RANKS = [
    ("qwen2", UNEVEN, FUSED, {}),
    ("qwen2", UNEVEN, {}, {"reshard_after_forward": False, "offload_policy": True}),
    ("qwen2", MicroBatching(tokens=18), {}, {"param_offload": True, "optimizer_offload": True}),
    ("qwen2", UNEVEN, {"quantization": "fp8"}, {}),  # float64: no difference is large enough to change a code
    ("llama", UNEVEN, {}, TP),
    ("qwen3", UNEVEN, FUSED, TP),
    ("qwen2", NINE, FUSED, SP),
    ("1 of 4 heads", MicroBatching(rows=3), VALUE, SP),  # fewer key/value heads than ranks
    ("gemma2", MicroBatching(), {}, SP),
    ("qwen3_moe", UNEVEN, FUSED, EP),
    ("qwen3_moe", UNEVEN, {"lora_rank": 3, "lora_alpha": 6, "target_parameters": ["all-experts"]}, {}),
]
SLOW_ON_2_RANKS = [
    ("3 of 6 heads", MicroBatching(rows=1), {}, SP),  # key/value heads that the ranks do not divide
    ("qwen3", UNEVEN, {}, TP),
    ("qwen2", UNEVEN, VALUE, TP),
    ("qwen2", UNEVEN, {"quantization": "fp8"}, SP),
    ("qwen3_moe", UNEVEN, {}, EP | {"enable_gradient_checkpointing": True}),
    ("qwen3_moe", UNEVEN, FUSED, {}),
    ("qwen3_moe", UNEVEN, FUSED, SP),
]
ON_4_RANKS = [
    ("qwen2", UNEVEN, {}, {"fsdp_size": 2, "reshard_after_forward": False}),
    ("llama", UNEVEN, VALUE, TP),
    ("qwen2", UNEVEN, {}, TP | {"fsdp_size": 1}),
    ("qwen3", UNEVEN, VALUE, TP | {"offload_policy": True}),
    ("qwen3", UNEVEN, {}, TP | SP),
    ("qwen2", NINE, {}, SP | {"fsdp_size": 2}),
    ("qwen2", NINE, {}, {"ulysses_sequence_parallel_size": 4}),
    ("1 of 4 heads", MicroBatching(rows=1), VALUE, {"ulysses_sequence_parallel_size": 4}),
    ("mixtral", UNEVEN, {}, EP),
    ("qwen3_moe", UNEVEN, {}, {"expert_parallel_size": 4}),
    ("qwen3_moe", UNEVEN, {}, EP | {"fsdp_size": 2}),
    ("qwen3_moe", UNEVEN, FUSED, EP | SP),
]


@pytest.mark.parametrize(
    ("world", "cases"),
    [
        (2, ON_2_RANKS),
        pytest.param(2, SLOW_ON_2_RANKS, marks=pytest.mark.slow),
        pytest.param(4, ON_4_RANKS, marks=pytest.mark.slow),
    ],
)
def test_ranks_give_the_numbers_of_one_device(world, cases, tmp_path):
    named = []
    for model, micro, keys, layout in cases:
        path = save_model(MODELS[model], tmp_path / str(len(named)), keys.get("kind", "causal_lm"))
        named.append((path, micro, keys, layout))
    ranks.assert_same_on_ranks(world, named)


@pytest.mark.slow
def test_bf16_with_recomputed_layers_gives_the_numbers_of_sharding_alone(tmp_path):
    path = save_model(MODELS["qwen3"], tmp_path)
    mixed = {"dtype": "bf16", "enable_gradient_checkpointing": True}
    alone = ranks.engine_alone(path, **mixed)
    found = run_on_ranks(2, ranks.engine_on_rank, path, UNEVEN, **TP, **mixed)
    for rank in found:
        assert torch.allclose(rank["outputs"], alone["outputs"], atol=0.05)
        assert rank["metrics"]["grad_norm"] == pytest.approx(alone["metrics"]["grad_norm"], rel=0.05)


def two_groups(path: str) -> dict:
    """Four ranks: two groups of two."""
    engine = make_engine(path, OPTIMIZER, sharded=True, ulysses_sequence_parallel_size=2)
    counted = engine.sum_over_ranks([float(engine.dp_rank + 1)])
    return {"layout": (engine.dp_rank, engine.model_parallel_rank, engine.dp_size), "counted": counted}


@pytest.mark.slow
def test_groups_of_ranks_share_rows_and_count_them_once(path):
    found = run_on_ranks(4, two_groups, path)
    assert [rank["layout"] for rank in found] == [(0, 0, 2), (0, 1, 2), (1, 0, 2), (1, 1, 2)]
    assert all(rank["counted"] == [3.0] for rank in found)


# ---- checkpoints ----------------------------------------------------------------------------------------------------


def train_and_save(path: str, sharding: dict, out: Path, resume: Path | None) -> dict:
    engine = make_engine(path, OPTIMIZER, sharded=True, **sharding, **FLOAT64)
    if resume:
        engine.load(resume, CONTENTS)
    found = ranks.results(engine, make_batch(), UNEVEN, steps=1)
    engine.save(out, CONTENTS, background=resume is None)
    engine.save(out / "exported", ("hf_model",))
    return found


TWO, FOUR = (2, TP), (4, TP)


@pytest.mark.fast("qwen3-stages0")
@pytest.mark.parametrize(
    ("model", "stages"),
    [
        ("qwen3", [TWO, (2, {})]),
        ("qwen3_moe", [(2, EP), (2, EP)]),
        pytest.param("qwen3", [(2, {}), (1, {})], marks=pytest.mark.slow),
        pytest.param("qwen3", [FOUR, TWO, FOUR], marks=pytest.mark.slow),
        pytest.param("mixtral", [(4, EP), (4, EP | SP), (2, {})], marks=pytest.mark.slow),
        pytest.param(
            "qwen3_moe", [(4, {"expert_parallel_size": 4}), (4, EP | {"fsdp_size": 2})], marks=pytest.mark.slow
        ),
    ],
)
def test_a_checkpoint_resumes_on_other_ranks_and_is_exported_and_merged(model, stages, tmp_path):
    """One update on the ranks of each stage, and a last one on one device."""
    path = save_model(MODELS[model], tmp_path / "model")
    before = None
    for number, (world, sharding) in enumerate(stages):
        last = run_on_ranks(world, train_and_save, path, sharding, tmp_path / str(number), before)
        before = tmp_path / str(number)
        folders = [before / "exported" / "huggingface"]
        if model not in ranks.MIXTURES:  # a merge is verified by logits, and transformers has no experts in float64
            folders.append(merge(MergeOptions(before, tmp_path / f"merged {number}", base=path)))
        for folder in folders:
            module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
            for name, value in last[0]["weights"].items():
                assert torch.equal(module.get_parameter(name), value), name
    resumed, straight = (make_engine(path, OPTIMIZER, **FLOAT64) for _ in range(2))
    resumed.load(before, CONTENTS)
    train(resumed, make_batch(), MicroBatching(), steps=1)
    train(straight, make_batch(), MicroBatching(), steps=len(stages) + 1)
    for (name, found), (_, expected) in zip(resumed.weights(), straight.weights()):
        assert torch.allclose(found, expected, rtol=0, atol=1e-9), name


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
    engine_sharding.load_module = None  # each rank reads its shards from the files
    engine, dtypes = make_engine(path, OPTIMIZER, sharded=True, dtype="bf16", reshard_after_forward=False), set()
    norm = engine.module.get_submodule("model.layers.0.input_layernorm")
    norm.register_forward_pre_hook(lambda norm, inputs: dtypes.add(norm.weight.dtype))
    engine.infer(share_of(engine, make_batch()), ("log_probs",), UNEVEN)
    return dict(engine.weights()), dtypes


def test_weights_are_those_loaded_not_what_a_forward_pass_left_gathered(path):
    """A pass in bf16 gathers them in bf16, which is half of the bytes, and leaves no rounded copy."""
    expected = dict(AutoModelForCausalLM.from_pretrained(path).named_parameters())
    for weights, gathered in run_on_ranks(2, weights_after_a_forward_pass, path):
        assert gathered == {torch.bfloat16}
        assert weights.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(weights[name], value), name


def test_a_shard_with_nan_is_refused_on_every_rank(tmp_path):
    path = save_model(qwen2(), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.norm.weight"][-1] = float("nan")  # of the last rank
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    for message in run_on_ranks(2, refusal, path):
        assert "1 of 2" in message and "the first is model.norm.weight" in message


def refusal(path: str) -> str:
    with pytest.raises(ValueError, match="expected finite weights") as error:
        make_engine(path, OPTIMIZER, sharded=True)
    return str(error.value)


# ---- what is refused ------------------------------------------------------------------------------------------------


REFUSED = [
    ({"fsdp_size": 3}, "fsdp_size 3 does not divide the 2 ranks"),
    ({"ulysses_sequence_parallel_size": 3}, "ulysses_sequence_parallel_size 3 does not divide the 2 ranks"),
    (SP | {"use_remove_padding": False}, "sequence parallelism splits packed sequences: set model.use_remove_padding"),
    ({"tensor_parallel_size": 3}, "tensor_parallel_size 3 does not divide the 2 ranks"),
    (TP | SP, "4 ranks would compute the same samples"),
    (TP | {"fsdp_size": 2}, "fsdp_size 2 does not divide the 1 ranks of a tensor-parallel share"),
    (TP, "tensor_parallel_size 2 does not divide the model's num_key_value_heads 1"),
    (TP | {"lora_rank": 2}, "LoRA is not supported with tensor parallelism"),
]


def refusals(path: str) -> list[str]:
    messages = []
    for keys, _ in REFUSED:
        with pytest.raises(ValueError) as error:
            make_engine(path, OPTIMIZER, sharded=True, **keys)
        messages.append(str(error.value))
    return messages


def test_sizes_that_do_not_fit_are_refused(tmp_path):
    for messages in run_on_ranks(2, refusals, save_model(qwen2(4, 1), tmp_path)):
        assert all(map(str.startswith, messages, (expected for _, expected in REFUSED))), messages


def trunk(config: PretrainedConfig) -> torch.nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config).base_model


def test_the_plan_names_every_matrix_of_a_block():
    assert planned_layers(trunk(MODELS["qwen3"]), "Qwen3")["layers.1.self_attn.q_norm"].startswith("replicated")
    layers = planned_layers(trunk(MODELS["llama"]), "Llama")
    assert len(layers) == 2 * 7 and layers["layers.0.mlp.down_proj"] == "rowwise"
    module = trunk(MODELS["llama"])  # some versions of transformers shard the embedding too
    module.config.base_model_tp_plan = module.config.base_model_tp_plan | {"embed_tokens": "embedding_rowwise"}
    assert planned_layers(module, "Llama") == layers


def without_a_norm() -> torch.nn.Module:
    module = trunk(MODELS["qwen3"])
    plan = module.config.base_model_tp_plan
    module.config.base_model_tp_plan = {name: style for name, style in plan.items() if "k_norm" not in name}
    return module


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: trunk(GPT2Config(n_layer=1, n_embd=32, n_head=2)), "Model has no plan for tensor parallelism"),
        (
            lambda: trunk(Phi3Config(**SIZES, pad_token_id=0)),
            r"Model: .* shards layers\.0\.\S+, a Linear, as 'rowwise_split_input', which is not",
        ),
        (without_a_norm, r"does not say how layers\.0\.self_attn\.k_norm is sharded"),
    ],
)
def test_a_model_without_a_plan_or_with_another_is_refused_by_name(make, message):
    with pytest.raises(ValueError, match=message):
        planned_layers(make(), "Model")


def test_heads_and_widths_that_the_ranks_cannot_share_are_refused():
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(Qwen2Config(**SIZES | {"intermediate_size": 45}))
    with pytest.raises(ValueError, match=r"size 2 does not divide the width 45 of layers\.0\.mlp\.gate_proj"):
        sharded_layers(module, 2)
    with pytest.raises(ValueError, match="ulysses_sequence_parallel_size 4 does not divide the model's 6 attention"):
        check_heads(6, 4)
