"""The engine of strategy=megatron over several gloo ranks gives the numbers of the fsdp engine on one device."""

import functools
import itertools

import pytest
import torch

from tests.engines.megatron_cpu import skip_reason

if reason := skip_reason():
    pytest.skip(reason, allow_module_level=True)

from tests.engines.megatron_cpu.compare import RUNS, assert_equal_runs, fsdp_runs, megatron_runs
from tests.engines.megatron_cpu.ranks import MODELS, read_shards, save_and_resume
from tests.engines.ranks import make_batch, make_engine, run_on_ranks, save_model
from verl.engines.base import MicroBatching
from verl.engines.micro_batch import plan_micro_batches
from verl.modeling.packing import row_lengths

pytestmark = pytest.mark.slow

OFFLOAD = {"param_offload": True, "grad_offload": True, "optimizer_offload": True}
RECOMPUTED = {
    "recompute_granularity": "selective",
    "recompute_modules": ["core_attn", "moe"],
    "moe_router_dtype": "fp32",
}


#: model, kind, ranks, keys
CASES = [
    ("llama", "causal_lm", 2, {"t": 2}),
    ("qwen3", "causal_lm", 2, {"t": 2, "sequence_parallel": False}),
    ("qwen3", "causal_lm", 2, {"p": 2}),
    ("deep", "causal_lm", 2, {"p": 2, "v": 2}),
    ("qwen2", "causal_lm", 2, {}),
    ("mistral", "causal_lm", 2, {"c": 2}),
    ("qwen2", "value", 2, {"t": 2}),
    ("llama", "value", 2, {"p": 2}),
    ("llama", "causal_lm", 2, {"t": 2, "use_distributed_optimizer": False}),
    ("llama", "causal_lm", 2, {"t": 2, "enable_gradient_checkpointing": True}),
    ("qwen3", "causal_lm", 4, {"t": 2}),
    ("deep", "causal_lm", 4, {"t": 2, "p": 2}),
    ("deep", "causal_lm", 4, {"t": 2, "p": 2, "v": 2}),
    ("llama", "causal_lm", 4, {"t": 2, "c": 2}),
    ("llama", "causal_lm", 4, {"p": 2, "c": 2}),
    ("qwen2", "causal_lm", 4, {"p": 2}),
    ("deep", "causal_lm", 2, {"p": 2, "override_transformer_config": {"num_layers_in_last_pipeline_stage": 1}}),
    ("qwen3_moe", "causal_lm", 2, {"e": 2, "enable_gradient_checkpointing": True} | OFFLOAD),
    ("qwen3_moe", "causal_lm", 4, {"t": 2, "p": 2, "e": 2, "et": 1, "override_transformer_config": RECOMPUTED}),
    ("qwen3_moe", "causal_lm", 4, {"p": 2, "v": 2, "e": 2}),
    ("qwen3_moe", "causal_lm", 2, {"e": 2}),
    ("qwen3_moe", "causal_lm", 2, {"p": 2}),
    ("mixtral", "causal_lm", 2, {"t": 2, "e": 2, "et": 1}),
    ("qwen3_moe", "causal_lm", 4, {"p": 2, "e": 2}),
    ("mixtral", "causal_lm", 4, {"t": 2, "e": 2}),
    ("mixtral", "causal_lm", 4, {"c": 2, "e": 2}),
    ("mixtral", "causal_lm", 4, {"e": 2}),
    ("mixtral", "value", 4, {"t": 2, "e": 2, "use_distributed_optimizer": False}),
    ("mixtral", "causal_lm", 4, {"t": 2, "c": 2, "e": 2}),
    ("qwen3_moe", "causal_lm", 4, {"p": 2, "c": 2, "e": 2}),
    ("deep", "causal_lm", 8, {"t": 2, "p": 2, "c": 2}),
    ("qwen3_moe", "causal_lm", 8, {"t": 2, "p": 2, "c": 2, "e": 2}),
    ("qwen3_moe", "causal_lm", 8, {"t": 2, "p": 2, "e": 2}),
]


@pytest.fixture(scope="module")
def on_one_device(tmp_path_factory):
    """(model, kind) -> its path, and the runs of the fsdp engine."""

    @functools.cache
    def found(model, kind):
        path = save_model(MODELS[model], tmp_path_factory.mktemp(model), kind)
        return path, fsdp_runs(path, kind)

    return found


@pytest.mark.parametrize(
    ("model", "world", "keys"),
    [
        ("llama", 2, {"t": 2}),
        ("deep", 2, {"p": 2}),
        ("mixtral", 2, {"e": 2}),
        ("qwen3_moe", 4, {"t": 2, "e": 2, "et": 1}),
        ("qwen3_moe", 4, {"p": 2, "v": 2, "e": 2}),
    ],
)
def test_shared_prompts_and_unequal_numbers_of_micro_batches(model, world, keys, on_one_device):
    """Ranks whose rows take other numbers of micro-batches exchange tokens for experts in each of them."""
    path, _ = on_one_device(model, "causal_lm")
    batch = make_batch(samples=2)
    micro = MicroBatching(tokens=16)
    counts = [
        len(plan_micro_batches(row_lengths(rows.batch["attention_mask"]), micro, rows.tensors))
        for rows in batch.chunk(2)
    ]
    assert counts[0] != counts[1]
    expected = fsdp_runs(path, batch=batch)
    for run in RUNS:  # moe/* counts a prompt once for each micro-batch that it is in
        expected[run]["metrics"] = [
            {name: value for name, value in step.items() if not name.startswith("moe/")}
            for step in expected[run]["metrics"]
        ]
    assert_equal_runs(run_on_ranks(world, megatron_runs, path, batch, micro, **keys), expected)


def test_all_products_of_sizes_are_compared():
    products = {tuple(keys.get(name, 1) for name in "tpce") for *_, keys in CASES}
    assert products == set(itertools.product((1, 2), repeat=4))


@pytest.mark.parametrize(("model", "kind", "world", "keys"), CASES)
def test_five_steps_over_ranks_are_those_of_one_device(model, kind, world, keys, on_one_device):
    """The gradient is clipped, so a wrong norm changes the weights too."""
    path, expected = on_one_device(model, kind)
    ranks = run_on_ranks(world, megatron_runs, path, kind=kind, **keys)
    assert_equal_runs(ranks, expected)
    t, p, c = (keys.get(name, 1) for name in "tpc")
    # ranks: t varies fastest, then c, d, p
    places = [(rank["dp_rank"], rank["tp"], rank["pp"]) for rank in ranks]
    d = world // (t * p * c)
    assert places == [(i // (t * c) % d, i % (t * c), i // (t * c * d)) for i in range(world)]


def test_stages_of_one_two_and_one_layers(on_one_device):
    path, expected = on_one_device("deep", "causal_lm")
    ends = {f"account_for_{name}_in_pipeline_split": True for name in ("embedding", "loss")}
    ranks = run_on_ranks(3, megatron_runs, path, kind="causal_lm", p=3, override_transformer_config=ends)
    assert_equal_runs(ranks, expected)


@pytest.mark.parametrize(
    ("model", "saved", "loaded"),
    [
        ("deep", {"t": 2}, {"p": 2}),
        ("deep", {"p": 2}, {"t": 2}),
        ("qwen3", {"t": 2}, {}),
        ("qwen3_moe", {"e": 2}, {"t": 2, "et": 2}),
        ("mixtral", {"t": 2, "e": 2, "et": 1}, {"use_distributed_optimizer": False}),
    ],
)
def test_a_checkpoint_resumes_exactly_and_in_another_layout(model, saved, loaded, tmp_path):
    path = save_model(MODELS[model], tmp_path / "model")
    run_on_ranks(2, save_and_resume, path, tmp_path / "one", None, **saved)
    straight = run_on_ranks(2, save_and_resume, path, tmp_path / "straight", None, steps=2, **saved)[0]["weights"]
    same = run_on_ranks(2, save_and_resume, path, tmp_path / "two", tmp_path / "one", **saved)[0]["weights"]
    assert all(torch.equal(same[name], tensor) for name, tensor in straight.items())
    other = run_on_ranks(2, save_and_resume, path, tmp_path / "three", tmp_path / "one", **loaded)[0]["weights"]
    for name, tensor in straight.items():
        assert torch.allclose(other[name], tensor, rtol=1e-5, atol=1e-5), name
    exported = make_engine(str(tmp_path / "two" / "huggingface"))
    assert all(torch.equal(p, straight[name]) for name, p in exported.weights())


def test_a_checkpoint_is_the_same_in_another_layout(tmp_path):
    """Weights and optimizer state bit for bit: saved by t=2, e=2, loaded and saved again by p=2."""
    path = save_model(MODELS["qwen3_moe"], tmp_path / "model")
    one, two = tmp_path / "one", tmp_path / "two"
    run_on_ranks(4, save_and_resume, path, one, None, t=2, e=2)
    run_on_ranks(2, save_and_resume, path, two, one, steps=0, p=2)
    first, second = (read_shards(folder / "shards") for folder in (one, two))
    assert first.keys() == second.keys()
    assert {key.rpartition(".")[2] for key in first if "gate_up" in key} == {"gate_up_proj", "exp_avg", "exp_avg_sq"}
    assert all(torch.equal(first[key], second[key]) for key in first)
