"""Experts as one function over grouped matmuls, against a loop in float64; fused layers in a training engine."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import MixtralConfig, Qwen3Config, Qwen3MoeConfig

from tests.engines.ranks import (
    OPTIMIZER,
    SIZES,
    UNEVEN,
    make_batch,
    make_engine,
    save_model,
    train,
)
from verl.modeling.fused_experts import fused_experts
from verl.modeling.linear import WeightCache

HIDDEN, WIDTH, EXPERTS, TOP_K = 16, 24, 5, 2
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


class Experts(nn.Module):
    """The parameters of a layer with experts."""

    def __init__(self, device: str, dtype: torch.dtype = torch.float32, width: int = WIDTH):
        super().__init__()
        torch.manual_seed(0)
        self.num_experts = EXPERTS
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 2 * width, HIDDEN).to(device, dtype) / 4)
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, HIDDEN, width).to(device, dtype) / 5)
        self.act_fn = nn.functional.silu


def inputs(tokens: int, device: str, seed: int) -> list[torch.Tensor]:
    """x, weights, chosen: no token goes to expert 3."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, EXPERTS, generator=generator)
    scores[:, 3] = -1
    found = torch.randn(tokens, HIDDEN, generator=generator), torch.rand(tokens, TOP_K, generator=generator)
    return [*(x.to(device).requires_grad_() for x in found), scores.topk(TOP_K).indices.to(device)]


def loop(module: Experts, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Token by token and expert by expert."""
    rows = []
    for token, factors, experts in zip(x, weights, chosen.tolist()):
        row = 0
        for factor, expert in zip(factors, experts):
            gate, up = (module.gate_up_proj[expert] @ token).chunk(2)
            row = row + factor * (module.down_proj[expert] @ (gate / (1 + (-gate).exp()) * up))
        rows.append(row)
    return torch.stack(rows)


def check_passes(device: str, cache: WeightCache, bf16: bool, tolerance: float) -> None:
    """Three passes, whose gradients add up, against the loop in float64."""
    ours, exact, pairs = Experts(device), Experts(device).double(), []
    for seed, tokens in enumerate((6, 1, 11)):
        given, wide = inputs(tokens, device, seed), inputs(tokens, device, seed)
        wide[:2] = [x.detach().double().requires_grad_() for x in wide[:2]]
        with torch.autocast(device, torch.bfloat16, enabled=bf16):
            y = fused_experts(ours, given[0], given[2], given[1], cache)
        assert y.dtype == torch.float32
        expected = loop(exact, *wide)
        g = torch.linspace(-1, 1, y.numel(), device=device).view(y.shape)
        y.backward(g)
        expected.backward(g.double())
        pairs += [(y, expected), *((a.grad, b.grad) for a, b in zip(given[:2], wide[:2]))]
    pairs += [(ours.gate_up_proj.grad, exact.gate_up_proj.grad), (ours.down_proj.grad, exact.down_proj.grad)]
    for found, right in pairs:
        assert float((found.detach().double() - right.detach()).norm() / right.detach().norm()) < tolerance
    assert ours.down_proj.grad.dtype == torch.float32
    assert ours.down_proj.grad[3].abs().max() == ours.gate_up_proj.grad[3].abs().max() == 0


@DEVICES
# in 16 bits, about six roundings of up to 2**-8, one after another
@pytest.mark.parametrize(("bf16", "tolerance"), [(False, 2e-6), (True, 0.016)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("add", [False, True])
def test_outputs_and_gradients_over_several_passes(device, bf16, tolerance, add):
    cache = WeightCache()
    check_passes(device, cache, bf16, tolerance)
    with cache.fixed_weights(keep=add, accumulate_gradients=add):
        check_passes(device, cache, bf16, tolerance)


@pytest.mark.parametrize(("dtype", "width"), [(torch.float64, WIDTH), (torch.float32, 6)])
def test_what_grouped_matmuls_do_not_support_is_computed_too(dtype, width):
    """float64, and rows of 24 bytes."""
    module, given = Experts("cpu", dtype, width), inputs(7, "cpu", 0)
    x, weights = (t.detach().to(dtype) for t in given[:2])
    found = fused_experts(module, x, given[2], weights, WeightCache())
    torch.testing.assert_close(found, loop(module, x, weights, given[2]))


def test_frozen_experts_pass_gradients_on_and_get_none():
    module, cache = Experts("cpu").requires_grad_(False), WeightCache()
    x, weights, chosen = inputs(4, "cpu", 0)
    with cache.fixed_weights(keep=True, accumulate_gradients=True):
        fused_experts(module, x, chosen, weights, cache).sum().backward()
    assert x.grad.abs().min() > 0 and weights.grad.abs().min() > 0
    assert module.gate_up_proj.grad is None and module.down_proj.grad is None


def test_only_one_matmul_per_pair_of_token_and_expert_is_kept():
    x, weights, chosen = inputs(50, "cpu", 0)
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        y = fused_experts(Experts("cpu"), x, chosen, weights, WeightCache())
    # x, gate and up of each pair, its weight and two int64 indices, and the ends of the experts
    pairs = 50 * TOP_K
    assert sum(kept.values()) == 4 * 50 * HIDDEN + pairs * (4 * 2 * WIDTH + 4 + 8 + 8) + 4 * EXPERTS
    assert y.requires_grad


LORA = {"lora_rank": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"]}
CONFIGS = {
    "qwen3_moe": Qwen3MoeConfig(
        **SIZES,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        norm_topk_prob=True,
        mlp_only_layers=[0],  # an MLP without experts
    ),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    "qwen3": Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=True),
}
MIXTURES = ("qwen3_moe", "mixtral")


@pytest.mark.fast("qwen3-causal_lm-lora4", "mixtral-causal_lm-lora2", "qwen3_moe-causal_lm-lora0", "qwen3-value-lora5")
@pytest.mark.parametrize(
    ("name", "kind", "lora"),
    [
        *((name, "causal_lm", lora) for name in MIXTURES for lora in ({}, LORA)),
        ("qwen3", "causal_lm", {"lora_rank": 2, "lora_alpha": 4}),
        ("qwen3", "value", {}),
    ],
)
def test_training_with_fused_layers_is_that_of_plain_layers(name, kind, lora, tmp_path):
    path, found = save_model(CONFIGS[name], tmp_path, kind), []
    output = "values" if kind == "value" else "log_probs"
    for kernels in ("plain", "fused"):
        torch.manual_seed(0)
        engine, batch = make_engine(path, OPTIMIZER, kind=kind, kernels=kernels, **lora), make_batch()
        train(engine, batch, UNEVEN)
        found.append(engine.infer(batch, (output,), UNEVEN)[output])
    assert torch.allclose(*found, atol=1e-4)


@pytest.mark.parametrize("kind", MIXTURES)
def test_no_layer_returns_a_view(kind, tmp_path):
    """FSDP2 registers hooks on the outputs of a layer, and warns of views."""
    engine, found = make_engine(save_model(CONFIGS[kind], tmp_path), kernels="fused"), []
    for layer in engine.module.model.layers:
        layer.register_forward_hook(lambda layer, given, outputs: found.extend(y._is_view() for y in outputs))
    engine.infer(make_batch(), ("log_probs",), UNEVEN)
    assert found and not any(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_tokens(dtype):
    """As on a rank of expert parallelism whose experts nobody chose: gradients of 0, which all ranks reduce."""
    module = SimpleNamespace(
        gate_up_proj=torch.randn(2, 16, 8, dtype=dtype, requires_grad=True),
        down_proj=torch.randn(2, 8, 8, dtype=dtype, requires_grad=True),
        num_experts=2,
        act_fn=torch.nn.functional.silu,
    )
    x, weights = torch.zeros(0, 8, dtype=dtype, requires_grad=True), torch.zeros(0, 1, dtype=dtype, requires_grad=True)
    out = fused_experts(module, x, torch.zeros(0, 1, dtype=torch.long), weights, WeightCache())
    out.sum().backward()
    assert out.shape == x.grad.shape == (0, 8) and weights.grad.shape == (0, 1)
    assert not module.gate_up_proj.grad.any() and not module.down_proj.grad.any()
