"""Weights and computation in different dtypes, on one device: what is computed, and what an update changes."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3MoeConfig

from tests.engines.ranks import (
    SIZES,
    engine_on_rank,
    make_batch,
    make_engine,
    objective_of,
    run_on_ranks,
    save_model,
    train,
)
from verl.config.schema import OptimConfig
from verl.engines.base import MicroBatching
from verl.engines.optimizer import round_stochastically
from verl.engines.torch_engine import TorchEngine

FAMILIES = {
    "llama": LlamaConfig(**SIZES, head_dim=8),
    "tied": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "moe": Qwen3MoeConfig(**SIZES, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24),
}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


def rounded_log_probs(path: str, dtype: torch.dtype, temperature: float) -> torch.Tensor:
    """Of the responses of `make_batch`, row by row in float64, with weights rounded to `dtype`."""
    eager = dict.fromkeys(("attn_implementation", "experts_implementation"), "eager")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **eager).double()
    batch = make_batch().batch
    width = batch["responses"].shape[1]
    log_probs = torch.zeros(batch["responses"].shape, dtype=torch.float64)
    for row, (ids, mask) in enumerate(zip(batch["input_ids"], batch["attention_mask"])):
        logits = model(ids[mask.bool()][None]).logits[0].detach() / temperature
        length = int(mask[-width:].sum())
        for t in range(length):
            log_probs[row, t] = logits[t - length - 1].log_softmax(-1)[batch["responses"][row, t]]
    return log_probs


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "stored, computed, bound", [("bf16", "fp32", 2e-5), ("fp64", "fp32", 2e-5), ("bf16", "fp64", 1e-6)]
)
def test_the_dtype_of_the_computation_is_obeyed(stored, computed, bound, family, tmp_path):
    path = save_model(FAMILIES[family], tmp_path)
    engine = make_engine(path, OptimConfig(), model_dtype=stored, dtype=computed)
    log_probs = engine.infer(make_batch(), ("log_probs",), MicroBatching(rows=3), temperature=0.7)["log_probs"]
    assert torch.allclose(log_probs.double(), rounded_log_probs(path, DTYPES[stored], 0.7), atol=bound)
    assert all(p.dtype == DTYPES[stored] for _, p in engine.weights())
    names = {name for name, _ in AutoModelForCausalLM.from_pretrained(path).named_parameters()}
    assert names == {name for name, _ in engine.weights()}


def gradients(engine: TorchEngine) -> dict[str, torch.Tensor]:
    """Of one mini-batch, before the optimizer step."""
    engine.optimizer.step = lambda: None
    engine.optimizer.zero_grad = lambda set_to_none: None
    for parameter in engine.module.parameters():
        parameter.grad = None
    engine.train_batch(make_batch(), objective_of(engine, make_batch()), MicroBatching())
    return {name: p.grad for name, p in engine.module.named_parameters()}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_those_of_the_computation(checkpointing, tmp_path):
    """Of float32 weights with the same values; each is rounded to the dtype of the weights once."""
    path = save_model(FAMILIES["llama"], tmp_path / "first")
    module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).float()
    module.save_pretrained(tmp_path / "rounded")
    optimizer = OptimConfig(clip_grad=1e9)
    keys = {"dtype": "fp32", "enable_gradient_checkpointing": checkpointing}
    narrow = gradients(make_engine(path, optimizer, model_dtype="bf16", **keys))
    wide = gradients(make_engine(str(tmp_path / "rounded"), optimizer, model_dtype="fp32", **keys))
    for name, gradient in wide.items():
        assert narrow[name].dtype == torch.bfloat16
        assert torch.allclose(narrow[name].float(), gradient, rtol=2**-8, atol=1e-6), name


def test_stochastic_rounding_gives_a_neighbor_with_the_right_probability():
    """bf16 has 8 bits: between 1 and 2 its values are 1 / 128 apart."""
    generator, draws = torch.Generator().manual_seed(0), 40_000
    for value, below, above in ((1 + 0.3 / 128, 1.0, 1 + 1 / 128), (-1.5 - 0.9 / 128, -1.5, -1.5 - 1 / 128)):
        rounded = round_stochastically(torch.full((draws,), value), generator).double()
        assert set(rounded.tolist()) == {below, above}
        probability = (value - below) / (above - below)
        deviation = math.sqrt(probability * (1 - probability) / draws)
        assert (rounded == above).double().mean().item() == pytest.approx(probability, abs=5 * deviation)
    exact = torch.tensor([0.0, -0.0, 1.0, -3.5, math.inf, -math.inf])
    assert torch.equal(round_stochastically(exact, generator).float(), exact)


def moved(path: str, steps: int, **keys) -> tuple[torch.Tensor, TorchEngine]:
    """By how much each weight has changed after updates with a learning rate of 1e-6, and the engine."""
    engine = make_engine(path, OptimConfig(weight_decay=0.0), **keys)
    before = torch.cat([p.detach().double().flatten() for _, p in engine.weights()])
    train(engine, make_batch(), MicroBatching(), steps)
    return torch.cat([p.detach().double().flatten() for _, p in engine.weights()]) - before, engine


def test_bf16_weights_follow_those_of_float32_only_with_stochastic_rounding(tmp_path):
    path, bf16 = save_model(FAMILIES["llama"], tmp_path), {"model_dtype": "bf16", "dtype": "bf16"}
    expected, _ = moved(path, 10)
    nearest, engine = moved(path, 10, **bf16)
    assert (nearest != 0).double().mean() < 0.05
    stochastic, engine = moved(path, 10, **bf16, stochastic_rounding=True)
    moments = [moment for state in engine.optimizer.state.values() for moment in state.values() if moment.dim()]
    assert {moment.dtype for moment in moments} == {torch.bfloat16}
    # the share of the float32 update that the weights have moved in its direction, 1 on average
    shares = [float((change * expected.sign()).sum() / expected.abs().sum()) for change in (nearest, stochastic)]
    assert shares[0] < 0.1 and 0.7 < shares[1] < 1.3, shares


def test_a_resumed_engine_rounds_as_one_that_was_not_stopped(tmp_path):
    path = save_model(FAMILIES["llama"], tmp_path / "model")
    keys = {"model_dtype": "bf16", "dtype": "bf16", "stochastic_rounding": True}
    first, whole = (make_engine(path, OptimConfig(lr=1e-3), **keys) for _ in range(2))
    train(first, make_batch(), MicroBatching(), 2)
    first.save(tmp_path / "saved", ("model", "optimizer", "extra"))
    resumed = make_engine(path, OptimConfig(lr=1e-3), **keys)
    resumed.load(tmp_path / "saved", ("model", "optimizer", "extra"))
    train(resumed, make_batch(), MicroBatching(), 2)
    train(whole, make_batch(), MicroBatching(), 4)
    for (name, one), (_, other) in zip(resumed.weights(), whole.weights()):
        assert torch.equal(one, other), name


@pytest.mark.fast("2")
@pytest.mark.parametrize("size", [1, 2])
def test_replicas_and_shards_round_alike(size, tmp_path):
    """fsdp_size=1: two replicas, which draw the same numbers. 2: shards, whose gathered weights follow the updates."""
    path = save_model(FAMILIES["tied"], tmp_path)
    keys = {"model_dtype": "bf16", "dtype": "fp32", "fsdp_size": size, "stochastic_rounding": True}
    one, other = run_on_ranks(2, engine_on_rank, path, MicroBatching(), **keys)
    before = dict(make_engine(path, model_dtype="bf16").weights())
    for name, weight in one["weights"].items():
        assert weight.dtype == torch.bfloat16 and torch.equal(weight, other["weights"][name]), name
    assert sum((weight != before[name]).sum() for name, weight in one["weights"].items()) > 1000
