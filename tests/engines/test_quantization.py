"""QLoRA: 4-bit weights under adapters, and what everybody else sees of them."""

import copy
import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.engines.ranks import MIXTURES, OPTIMIZER, make_batch, make_engine, make_spec, qwen2, save_model, train
from tests.planner.test_planner import TINY
from verl.config.schema import ModelConfig
from verl.engines.base import MicroBatching
from verl.engines.quantization import check_quantization
from verl.engines.sharding import make_sharding
from verl.planner.memory import optimizer_bytes, weights
from verl.planner.workload import Job, Role

needs_bitsandbytes = pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes")

QLORA = {"lora_rank": 3, "lora_alpha": 6, "quantization": "nf4", "use_remove_padding": False}
CONTENTS = ("model", "optimizer", "extra")
#: the 16 values of NF4, appendix E of the paper
LEVELS = torch.tensor(
    [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334]
    + [-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224]
    + [0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0]
)


def nf4(weight: torch.Tensor) -> torch.Tensor:
    """The nearest value of NF4 times the largest magnitude of 64 elements."""
    blocks = weight.reshape(-1, 64)
    scale = blocks.abs().amax(1, keepdim=True)
    nearest = (blocks[..., None] / scale[..., None] - LEVELS).abs().argmin(-1)
    return (LEVELS[nearest] * scale).view(weight.shape)


def log_probs(engine) -> torch.Tensor:
    return engine.infer(make_batch(), ("log_probs",), MicroBatching())["log_probs"]


def wide(config):
    """The config with rows of 64 and 128 elements: a block does not cross rows."""
    config = copy.deepcopy(config)
    config.hidden_size, config.intermediate_size, config.head_dim = 64, 128, 16
    return config


@pytest.fixture
def path(tmp_path):
    return save_model(wide(qwen2()), tmp_path / "model")


@needs_bitsandbytes
def test_linear_weights_have_4_bits_and_the_values_of_the_paper(path):
    module = make_engine(path, OPTIMIZER, **QLORA).module
    codes = {n: p for n, p in module.named_parameters() if p.dtype == torch.uint8}
    assert {name.split(".")[-3] for name in codes} == {
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    }
    plain = AutoModelForCausalLM.from_pretrained(path)
    base = dict(make_engine(path, OPTIMIZER, **QLORA).adapters.base())
    assert base.keys() == dict(plain.named_parameters()).keys()
    for name, weight in plain.named_parameters():
        expected = nf4(weight.detach()) if name.replace(".weight", ".base_layer.weight") in codes else weight
        assert torch.allclose(base[name], expected, atol=1e-6), name


@needs_bitsandbytes
def test_a_run_trains_pushes_resumes_and_merges_the_same_policy(path, tmp_path):
    from verl.model_merger.merge import MergeOptions, merge

    engine = make_engine(path, OPTIMIZER, **QLORA)
    start = log_probs(engine)
    before = {name: p.clone() for name, p in engine.module.named_parameters() if not p.requires_grad}
    train(engine, make_batch(), MicroBatching())
    assert all(torch.equal(before[name], p) for name, p in engine.module.named_parameters() if name in before)
    with engine.reference():  # the initial policy has 4-bit weights too
        assert torch.equal(log_probs(engine), start)
    trained, actor = log_probs(engine), tmp_path / "run" / "actor"
    assert (trained - start).abs().max() > 0.05
    engine.save(actor, (*CONTENTS, "hf_model"))
    resumed = make_engine(path, OPTIMIZER, **QLORA)
    resumed.load(actor, CONTENTS)
    assert torch.equal(log_probs(resumed), trained)
    for each in (engine, resumed):
        train(each, make_batch(), MicroBatching())
    assert torch.equal(log_probs(resumed), log_probs(engine))
    # what a rollout gets, what is exported, and what the merge of the adapters computes
    merge(MergeOptions(actor, tmp_path / "merged"))
    pushed = make_engine(path, use_remove_padding=False)
    resumed.load(actor, CONTENTS)
    with torch.no_grad():
        for name, value in resumed.weights():
            pushed.module.get_parameter(name).copy_(value)
    for other in (pushed, *(make_engine(str(p)) for p in (actor / "huggingface", tmp_path / "merged"))):
        assert torch.allclose(log_probs(other), trained, atol=1e-5)


@needs_bitsandbytes
def test_experts_and_routers_keep_their_dtype(tmp_path):
    path = save_model(wide(MIXTURES["qwen3_moe"]), tmp_path)
    module = make_engine(path, OPTIMIZER, dtype="bf16", **QLORA).module
    dtypes = {name: p.dtype for name, p in module.named_parameters() if "lora" not in name}
    assert {dtype for name, dtype in dtypes.items() if "self_attn" in name and "norm" not in name} == {torch.uint8}
    assert {dtype for name, dtype in dtypes.items() if "self_attn" not in name} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("settings", "ranks", "message"),
    [
        ({}, 1, "4-bit weights are not trained: set model.lora_rank, or model.quantization=null"),
        ({"lora_rank": 4}, 2, "4-bit weights are not sharded, and the model has 2 processes: use one"),
    ],
)
def test_what_is_not_supported_is_refused(settings, ranks, message):
    model = ModelConfig(path="x", quantization="nf4", **settings)
    with pytest.raises(ValueError, match=message):
        check_quantization(model, ranks)
    with pytest.raises(ValueError, match=message):
        make_sharding(replace(make_spec("x", **settings, quantization="nf4"), world_size=ranks))


def test_the_plan_counts_4_bits(tmp_path: Path):
    """TINY has 1,704 parameters, of which the matrices of two layers have 4.5 bits, and 1,024 in adapters."""
    role = Role("actor", TINY, trains=True, lora_rank=4, weight_bytes=2, is_quantized=True)
    linear = 2 * (8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 16)
    job = Job([role], 1, 1, 1, 1)
    assert weights(job, role) == linear * 4.5 / 8 + (1704 - linear) * 2 + 4 * 1024
    assert optimizer_bytes(job, role) == 8 * 1024
    assert optimizer_bytes(job, replace(role, has_8bit_optimizer=True)) == 2 * 1024
