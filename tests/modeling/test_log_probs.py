"""Statistics of the last projection: their gradient by finite differences, and no large float32 tensor on the way."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from verl.modeling import log_probs

VOCABULARY = 1201


class Widest(TorchDispatchMode):
    """The most rows of any result with one column per token of the vocabulary, by dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[torch.dtype, int] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        for x in tree_leaves(results):
            if isinstance(x, torch.Tensor) and x.shape[-1:] == (VOCABULARY,):
                self.rows[x.dtype] = max(self.rows.get(x.dtype, 0), x.numel() // VOCABULARY)
        return results


@pytest.mark.parametrize("outputs", [("log_probs",), log_probs.OUTPUTS])
def test_no_float32_tensor_of_all_tokens_and_the_vocabulary(outputs, monkeypatch):
    tokens, chunk = 96, 8
    monkeypatch.setitem(log_probs.CHUNK_ELEMENTS, "cpu", chunk * VOCABULARY + 5)
    torch.manual_seed(0)
    states = torch.randn(tokens, 4, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(VOCABULARY, 4, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(VOCABULARY, (tokens,))
    with Widest() as widest:
        found = log_probs.token_statistics(states, targets, lambda x: x @ weight.t(), VOCABULARY, outputs)
        sum(values.sum() for values in found.values()).backward()
    assert {values.dtype for values in found.values()} == {torch.float32}
    assert widest.rows[torch.float32] == widest.rows[torch.bfloat16] == chunk


@pytest.mark.parametrize(("kept", "passes"), [(0, 2), (96 * VOCABULARY * 4, 1), (96 * VOCABULARY * 4 - 1, 2)])
def test_logits_that_fit_are_not_recomputed_on_a_cpu(kept, passes, monkeypatch):
    """96 states in chunks of 8 are 12 calls of the output layer in a forward pass."""
    monkeypatch.setitem(log_probs.CHUNK_ELEMENTS, "cpu", 8 * VOCABULARY)
    monkeypatch.setattr(log_probs, "KEPT_BYTES", kept)
    states, weight = torch.randn(96, 4, requires_grad=True), torch.randn(4, VOCABULARY)
    calls = []

    def head(x: torch.Tensor) -> torch.Tensor:
        calls.append(len(x))
        return x @ weight

    found = log_probs.token_statistics(states, torch.zeros(96, dtype=torch.long), head, VOCABULARY, ("log_probs",))
    found["log_probs"].sum().backward()
    assert calls == [8] * 12 * passes


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("wanted", [(True, False, False), (True, True, False), (True, False, True), (True, True, True)])
def test_the_gradient_of_the_logits_by_finite_differences(wanted, temperature):
    """(f(x + h) - f(x - h)) / 2h of a weighted sum of the statistics, one logit after another, in float64."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 7, generator=generator, dtype=torch.float64) * 2
    targets = torch.tensor([6, 0, 3])
    weights = tuple(torch.randn(3, generator=generator, dtype=torch.float64) * asked for asked in map(float, wanted))

    def total(logits_: torch.Tensor) -> float:
        _, *found = log_probs.logit_statistics(logits_, targets, temperature, wanted)
        return sum((w * values).sum().item() for w, values in zip(weights, found))

    expected, h = torch.zeros_like(x), 1e-5
    for i in range(3):
        for j in range(7):
            step = torch.zeros_like(x)
            step[i, j] = h
            expected[i, j] = (total(x + step) - total(x - step)) / (2 * h)
    lse, _, entropys, squares = log_probs.logit_statistics(x, targets, temperature, wanted)
    gradients = tuple(w if asked else None for w, asked in zip(weights, wanted))
    found = log_probs.gradient_of_logits(x, targets, lse, entropys, squares, gradients, temperature)
    assert torch.allclose(found, expected, atol=1e-8)


def test_what_is_measured_alone_has_no_part_in_the_gradient():
    torch.manual_seed(0)
    states, weight = torch.randn(5, 4), torch.randn(9, 4)
    targets, gradients = torch.arange(5), []
    for outputs in (("log_probs",), log_probs.OUTPUTS):
        leaf = states.clone().requires_grad_()
        found = log_probs.token_statistics(leaf, targets, lambda x: x @ weight.t(), 9, outputs)
        found["log_probs"].sin().sum().backward()
        gradients.append(leaf.grad)
    assert torch.equal(*gradients)


def test_a_forbidden_token_leaves_the_entropy_and_its_gradient_finite():
    x = torch.tensor([[0.5, float("-inf"), 1.0]], requires_grad=True)
    found = log_probs.token_statistics(x, torch.tensor([0]), lambda states: states, 3, log_probs.OUTPUTS)
    p = torch.tensor([0.5, 1.0], dtype=torch.float64).softmax(0)
    assert found["entropys"].item() == pytest.approx(-(p * p.log()).sum().item(), rel=1e-6)
    (found["log_probs"] + found["entropys"]).sum().backward()
    assert x.grad.isfinite().all()
    assert x.grad[0, 1] == 0
