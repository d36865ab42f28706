"""Fused linear layers with weights cast once, and gradients accumulated outside of autograd."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from verl.modeling.linear import Embedding, FusedLinear, WeightCache

F32, F64 = torch.float32, torch.float64


def layers(bias: bool, sizes: tuple[int, ...] = (3, 5, 2)) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(4, size, bias=bias, dtype=F32) for size in sizes]


def fused(x: torch.Tensor, found: list[nn.Linear], cache: WeightCache, dtype: torch.dtype = F32) -> torch.Tensor:
    biases = [layer.bias for layer in found if layer.bias is not None]
    return FusedLinear.apply(x, dtype, cache, len(found), *(layer.weight for layer in found), *biases)


def expected(x: torch.Tensor, found: list[nn.Linear]) -> torch.Tensor:
    """By torch, in float64 and layer by layer."""
    return torch.cat([layer.double()(x.double()) for layer in found], -1)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("sizes", [(3, 5, 2), (6,)])
def test_outputs_and_gradients_over_several_passes(sizes, bias, add, keep):
    ours, exact, cache = layers(bias, sizes), layers(bias, sizes), WeightCache()
    passes = [torch.randn(2, n, 4, requires_grad=True) for n in (3, 1, 6)]
    with cache.fixed_weights(keep=keep, accumulate_gradients=add):
        for x in passes:
            y = fused(x, ours, cache)
            g = torch.randn_like(y)
            y.backward(g)
            wide = x.detach().double().requires_grad_()
            z = expected(wide, exact)
            z.backward(g.double())
            assert torch.allclose(y.double(), z, atol=1e-6)
            assert torch.allclose(x.grad.double(), wide.grad, atol=1e-6)
    for layer, other in zip(ours, exact):
        for p, q in zip(layer.parameters(), other.parameters()):
            assert p.grad.dtype == F32
            assert torch.allclose(p.grad.double(), q.grad, atol=1e-5)


def test_a_cast_is_kept_for_the_phase():
    (layer,) = layers(False, (3,))
    cache, x = WeightCache(), torch.randn(2, 4)
    with torch.no_grad():
        with cache.fixed_weights(keep=True, accumulate_gradients=False):
            before = fused(x, [layer], cache, F64)
            layer.weight.mul_(2)
            assert torch.equal(fused(x, [layer], cache, F64), before)
        with cache.fixed_weights(keep=True, accumulate_gradients=False):
            assert torch.equal(fused(x, [layer], cache, F64), 2 * before)
        with cache.fixed_weights(keep=False, accumulate_gradients=False):
            layer.weight.mul_(2)
            assert torch.equal(fused(x, [layer], cache, F64), 4 * before)
    assert not cache.active


def test_an_existing_gradient_is_accumulated_into():
    """As with tied weights, where the gradient of the embedding comes through autograd."""
    (layer,), cache, x = layers(False, (3,)), WeightCache(), torch.randn(2, 4)
    with cache.fixed_weights(keep=True, accumulate_gradients=True):
        (fused(x, [layer], cache).sum() + (layer.weight * 3).sum()).backward()
        fused(x, [layer], cache).sum().backward()
    assert torch.allclose(layer.weight.grad, 2 * x.sum(0).expand(3, 4) + 3)


@pytest.mark.parametrize("add", [False, True])
def test_frozen_layers_pass_gradients_through_and_keep_none(add):
    found, cache = layers(True), WeightCache()
    for layer in found:
        layer.requires_grad_(False)
    x = torch.randn(3, 4, requires_grad=True)
    with cache.fixed_weights(keep=True, accumulate_gradients=add):
        fused(x, found, cache).sum().backward()
    assert torch.allclose(x.grad, sum(layer.weight.sum(0) for layer in found).expand(3, 4))
    assert all(p.grad is None for layer in found for p in layer.parameters())


@pytest.mark.parametrize("add", [False, True])
def test_gradients_with_activations_computed_again(add):
    found, cache, x = layers(True), WeightCache(), torch.randn(3, 4, requires_grad=True)
    with cache.fixed_weights(keep=True, accumulate_gradients=add):
        checkpoint(fused, x, found, cache, use_reentrant=False).sum().backward()
    assert all(torch.allclose(layer.weight.grad, x.detach().sum(0).expand_as(layer.weight)) for layer in found)
    assert all(torch.equal(layer.bias.grad, torch.full_like(layer.bias, 3)) for layer in found)


@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.parametrize("add", [False, True])
def test_embedding_accumulates_into_an_existing_gradient(add, padding):
    torch.manual_seed(0)
    ours, exact = (nn.Embedding(7, 4, padding_idx=padding, dtype=dtype) for dtype in (F32, F64))
    exact.load_state_dict(ours.state_dict())
    cache = WeightCache()
    with cache.fixed_weights(keep=True, accumulate_gradients=add):
        for ids in ([[1, 3, 1]], [[6, 3, 2], [1, 1, 1]]):
            ids = torch.tensor(ids)
            y, z = Embedding.apply(ids, ours.weight, padding, cache), exact(ids)
            assert torch.equal(y.double(), z)
            g = torch.randn_like(y)
            y.backward(g)
            z.backward(g.double())
    assert torch.allclose(ours.weight.grad.double(), exact.weight.grad, atol=1e-6)
    assert exact.weight.grad[1].abs().sum() > 0
