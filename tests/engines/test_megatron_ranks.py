"""The engine of strategy=megatron over several gloo ranks gives the numbers of the fsdp engine on one device."""

import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed: make test-megatron")

from tests.engines.megatron_cpu.ranks import MODELS, OPTIMIZER, megatron_on_rank, save_and_resume
from tests.engines.ranks import assert_same, make_batch, make_engine, results, run_on_ranks, save_model
from verl.engines.base import MicroBatching

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("model", "kind", "world", "keys"),
    [
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
    ],
)
def test_five_steps_over_ranks_are_those_of_one_device(model, kind, world, keys, tmp_path):
    """The gradient is clipped, so a wrong norm changes the weights too."""
    path = save_model(MODELS[model], tmp_path, kind)
    expected = results(make_engine(path, OPTIMIZER, kind=kind), make_batch(), MicroBatching(), 5)
    ranks = run_on_ranks(world, megatron_on_rank, path, kind=kind, **keys)
    assert_same(ranks, expected, atol=1e-4)
    t, p, c = (keys.get(name, 1) for name in "tpc")
    # ranks: t varies fastest, then c, d, p
    places = [(rank["dp_rank"], rank["tp"], rank["pp"]) for rank in ranks]
    d = world // (t * p * c)
    assert places == [(i // (t * c) % d, i % (t * c), i // (t * c * d)) for i in range(world)]


def test_a_checkpoint_of_several_ranks_resumes_exactly_and_refuses_other_sizes(tmp_path):
    path = save_model(MODELS["deep"], tmp_path / "model")
    keys = {"t": 2, "p": 2}
    run_on_ranks(4, save_and_resume, path, tmp_path / "one", None, **keys)
    resumed = run_on_ranks(4, save_and_resume, path, tmp_path / "two", tmp_path / "one", **keys)
    straight = run_on_ranks(4, save_and_resume, path, tmp_path / "straight", None, steps=2, **keys)
    for name, tensor in straight[0]["weights"].items():
        assert torch.equal(resumed[0]["weights"][name], tensor), name
    exported = make_engine(str(tmp_path / "two" / "huggingface"))
    assert all(torch.equal(p, straight[0]["weights"][name]) for name, p in exported.weights())
    with pytest.raises(AssertionError, match="was saved with parallel sizes"):
        run_on_ranks(2, save_and_resume, path, tmp_path / "three", tmp_path / "one", t=2)
