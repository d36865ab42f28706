"""A run resumes exactly, whatever is trained; which tensors are not saved; parts that a checkpoint does not have."""

from fractions import Fraction

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.engines.ranks import MIXTURES, OPTIMIZER, make_batch, make_engine, qwen2, save_model, train
from verl.engines.base import MicroBatching
from verl.engines.checkpoint import are_broken, load_extra

MODELS = MIXTURES | {"qwen2": qwen2()}


@pytest.mark.fast("adapters", "qwen3_moe")
@pytest.mark.parametrize("model", ["qwen2", "adapters", "qwen3_moe", "mixtral"])
def test_a_resumed_run_continues_exactly_and_the_checkpoint_is_a_huggingface_model(model, tmp_path):
    keys = {"lora_rank": 3, "lora_alpha": 6} if model == "adapters" else {}
    path = save_model(MODELS.get(model, MODELS["qwen2"]), tmp_path / "model")
    straight, resumed = (make_engine(path, OPTIMIZER, **keys) for _ in range(2))
    train(straight, make_batch(), MicroBatching(rows=2))
    straight.save(tmp_path, ("model", "optimizer", "extra", "hf_model"))
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "huggingface")
    assert all(torch.equal(value, exported.get_parameter(name)) for name, value in straight.weights())
    resumed.load(tmp_path, ("model", "optimizer", "extra"))
    norms = [train(engine, make_batch(), MicroBatching(rows=2))["grad_norm"] for engine in (straight, resumed)]
    assert norms[0] == norms[1] and straight.lr_step() == resumed.lr_step()
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(straight.weights(), resumed.weights()))


def test_broken_tensors_are_those_with_a_value_beyond_its_limit():
    limit, largest = 1e6, torch.finfo(torch.float32).max
    nan, inf = float("nan"), float("inf")
    cases = {
        "w1": ([limit, -limit, limit], False),  # the Euclidean norm is beyond the limit, no value is
        "w2": ([0.0, -1.1e6], True),
        "w3": ([nan, 0.0], True),
        "w4": ([0.0, -inf], True),
        "w5": ([], False),
        "w6 (exp_avg_sq)": ([largest, largest], False),  # the sum of squares overflows
        "w7 (exp_avg_sq)": ([1e30, inf], True),
        "w8 (exp_avg)": ([nan, 1.0], True),
        "w9 (exp_avg)": ([2e6, 1.0], False),
    }
    for dtype in (torch.float32, torch.bfloat16):
        tensors = {name: torch.tensor(values, dtype=dtype) for name, (values, _) in cases.items()}
        if dtype == torch.bfloat16:  # its largest value is below that of float32
            tensors["w6 (exp_avg_sq)"] = torch.full((2,), torch.finfo(dtype).max, dtype=dtype)
        assert are_broken(tensors) == [is_broken for _, is_broken in cases.values()]


def test_a_schedule_that_was_not_saved_is_explained(tmp_path):
    torch.save({"steps": 3}, tmp_path / "extra.pt")
    assert load_extra(tmp_path) == {"steps": 3}
    torch.save({"steps": Fraction(3)}, tmp_path / "extra.pt")  # an object is code that runs when it is read
    with pytest.raises(ValueError, match=r"only tensors and plain values are read\): .*Fraction"):
        load_extra(tmp_path)
    (tmp_path / "extra.pt").unlink()
    with pytest.raises(ValueError, match=r"no extra.pt .*was it saved without it \(save_contents\)"):
        load_extra(tmp_path)
