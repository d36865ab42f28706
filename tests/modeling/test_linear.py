"""Products of several layers with weights cast once, and gradients added up outside of autograd."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from verl.modeling.linear import Embedding, Phase, Product

F32, F64 = torch.float32, torch.float64


def layers(bias: bool, sizes: tuple[int, ...] = (3, 5, 2)) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(4, size, bias=bias, dtype=F32) for size in sizes]


def product(x: torch.Tensor, found: list[nn.Linear], phase: Phase, dtype: torch.dtype = F32) -> torch.Tensor:
    biases = [layer.bias for layer in found if layer.bias is not None]
    return Product.apply(x, dtype, phase, len(found), *(layer.weight for layer in found), *biases)


def expected(x: torch.Tensor, found: list[nn.Linear]) -> torch.Tensor:
    """By torch, in float64 and layer by layer."""
    return torch.cat([layer.double()(x.double()) for layer in found], -1)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("sizes", [(3, 5, 2), (6,)])
def test_outputs_and_gradients_over_several_passes(sizes, bias, add, keep):
    ours, exact, phase = layers(bias, sizes), layers(bias, sizes), Phase()
    passes = [torch.randn(2, n, 4, requires_grad=True) for n in (3, 1, 6)]
    with phase(keep=keep, add_gradients=add):
        for x in passes:
            y = product(x, ours, phase)
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


def test_a_kept_copy_lasts_for_the_phase():
    (layer,) = layers(False, (3,))
    phase, x = Phase(), torch.randn(2, 4)
    with torch.no_grad():
        with phase(keep=True, add_gradients=False):
            before = product(x, [layer], phase, F64)
            layer.weight.mul_(2)
            assert torch.equal(product(x, [layer], phase, F64), before)
        with phase(keep=True, add_gradients=False):
            assert torch.equal(product(x, [layer], phase, F64), 2 * before)
        with phase(keep=False, add_gradients=False):
            layer.weight.mul_(2)
            assert torch.equal(product(x, [layer], phase, F64), 4 * before)
    assert not phase.on


def test_a_gradient_that_is_there_already_is_added_to():
    """As of tied weights, where the embedding's comes through autograd."""
    (layer,), phase, x = layers(False, (3,)), Phase(), torch.randn(2, 4)
    with phase(keep=True, add_gradients=True):
        (product(x, [layer], phase).sum() + (layer.weight * 3).sum()).backward()
        product(x, [layer], phase).sum().backward()
    assert torch.allclose(layer.weight.grad, 2 * x.sum(0).expand(3, 4) + 3)


@pytest.mark.parametrize("add", [False, True])
def test_frozen_layers_pass_gradients_on_and_keep_none(add):
    found, phase = layers(True), Phase()
    for layer in found:
        layer.requires_grad_(False)
    x = torch.randn(3, 4, requires_grad=True)
    with phase(keep=True, add_gradients=add):
        product(x, found, phase).sum().backward()
    assert torch.allclose(x.grad, sum(layer.weight.sum(0) for layer in found).expand(3, 4))
    assert all(p.grad is None for layer in found for p in layer.parameters())


@pytest.mark.parametrize("add", [False, True])
def test_gradients_with_activations_computed_again(add):
    found, phase, x = layers(True), Phase(), torch.randn(3, 4, requires_grad=True)
    with phase(keep=True, add_gradients=add):
        checkpoint(product, x, found, phase, use_reentrant=False).sum().backward()
    assert all(torch.allclose(layer.weight.grad, x.detach().sum(0).expand_as(layer.weight)) for layer in found)
    assert all(torch.equal(layer.bias.grad, torch.full_like(layer.bias, 3)) for layer in found)


@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.parametrize("add", [False, True])
def test_embedding_adds_to_the_gradient_that_is_there(add, padding):
    torch.manual_seed(0)
    ours, exact = (nn.Embedding(7, 4, padding_idx=padding, dtype=dtype) for dtype in (F32, F64))
    exact.load_state_dict(ours.state_dict())
    phase = Phase()
    with phase(keep=True, add_gradients=add):
        for ids in ([[1, 3, 1]], [[6, 3, 2], [1, 1, 1]]):
            ids = torch.tensor(ids)
            y, z = Embedding.apply(ids, ours.weight, padding, phase), exact(ids)
            assert torch.equal(y.double(), z)
            g = torch.randn_like(y)
            y.backward(g)
            z.backward(g.double())
    assert torch.allclose(ours.weight.grad.double(), exact.weight.grad, atol=1e-6)
    assert exact.weight.grad[1].abs().sum() > 0
