"""Value, entropy and SFT losses: loops, gradients, splits, padding; and what the actor expects of a policy loss."""

import math

import pytest
import torch

from tests.algorithms.merging import merge_metrics
from verl.algorithms import LOSS_AGG_MODES, LossAggregation, entropy_loss, sft_nll, value_loss
from verl.algorithms.actor_loss import actor_loss
from verl.algorithms.kl import entropy_from_logits, sum_pi_squared_from_logits
from verl.algorithms.policy_losses import register_policy_loss

MASK = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1], [0, 0, 0]])


def column(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.where(MASK.bool(), torch.randn(4, 3, generator=generator, dtype=torch.float64), torch.nan)


LOSSES = {
    "value": lambda x, mask, mode, rows=slice(None): value_loss(
        x, column(1)[rows], column(2)[rows], mask, mode, cliprange_value=0.3
    ),
    "sft": lambda x, mask, mode, rows=slice(None): sft_nll(x, mask, mode),
}


def test_value_loss_equals_the_loop():
    total, clipped_tokens = 0.0, 0
    for i, t in MASK.nonzero().tolist():
        v, ret, old = (column(seed)[i, t].item() for seed in (0, 1, 2))
        clipped = min(max(v, old - 0.3), old + 0.3)
        total += 0.5 * max((v - ret) ** 2, (clipped - ret) ** 2)
        clipped_tokens += (clipped - ret) ** 2 > (v - ret) ** 2
    loss, metrics = LOSSES["value"](column(0), MASK, "token-mean")
    assert loss.item() == pytest.approx(total / 6)
    assert merge_metrics([metrics])["critic/vf_clipfrac"] == pytest.approx(clipped_tokens / 6)
    assert clipped_tokens


def test_sft_nll():
    loss, metrics = sft_nll(torch.tensor([[-1.0, -3, -5]]), torch.tensor([[0, 1, 1]]))
    assert loss == 4 and merge_metrics([metrics]) == {"train/nll": 4}


@pytest.mark.parametrize("name", LOSSES)
def test_gradient_by_finite_differences(name):
    inside = MASK.bool()

    def of_valid_tokens(values):
        return LOSSES[name](torch.full((4, 3), math.nan).double().masked_scatter(inside, values), MASK, "token-mean")[0]

    torch.autograd.gradcheck(of_valid_tokens, column(0)[inside].requires_grad_())


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_micro_batches_add_up_and_read_no_padding(name, mode):
    aggregation = LossAggregation.from_mask(mode, MASK)
    x = column(0).requires_grad_()
    whole, metrics = LOSSES[name](x, MASK, aggregation)
    cuts = [slice(0, 1), slice(1, 3), slice(3, 4)]
    parts = [LOSSES[name](x[rows], MASK[rows], aggregation, rows) for rows in cuts]
    torch.testing.assert_close(sum(loss for loss, _ in parts), whole)
    (gradient,) = torch.autograd.grad(whole, x)
    assert (gradient[MASK == 0] == 0).all()
    torch.testing.assert_close(torch.autograd.grad(sum(loss for loss, _ in parts), x)[0], gradient)
    assert merge_metrics([m for _, m in parts]) == pytest.approx(merge_metrics([metrics]))


def test_entropy_equals_the_definition():
    logits = torch.randn(3, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    p = torch.softmax(logits, -1)
    torch.testing.assert_close(entropy_from_logits(logits), -(p * p.log()).sum(-1))
    torch.testing.assert_close(entropy_from_logits(logits + 100), -(p * p.log()).sum(-1))
    torch.testing.assert_close(sum_pi_squared_from_logits(logits), (p**2).sum(-1))
    torch.autograd.gradcheck(entropy_from_logits, logits.requires_grad_())


def test_entropy_with_a_token_of_probability_zero():
    logits = torch.tensor([[0.0, 0, -torch.inf]], requires_grad=True)
    entropy = entropy_from_logits(logits)
    entropy.sum().backward()
    assert entropy.item() == pytest.approx(math.log(2))
    assert torch.isfinite(logits.grad).all()


@pytest.mark.parametrize("function", [entropy_from_logits, sum_pi_squared_from_logits])
def test_bfloat16_logits_are_read_in_float32(function):
    assert function(torch.randn(2, 5).bfloat16()).dtype == torch.float32


def test_entropy_loss_reads_no_padding():
    logits = torch.full((4, 3, 2), math.nan, dtype=torch.float64)
    logits[MASK.bool()] = torch.tensor([0, math.log(3)], dtype=torch.float64)
    logits.requires_grad_()
    loss = entropy_loss(logits, MASK)
    loss.backward()
    assert loss.item() == pytest.approx(0.562335, abs=1e-6)  # of the distribution (1/4, 3/4)
    assert torch.isfinite(logits.grad).all()
    assert (logits.grad[MASK == 0] == 0).all()


SCALAR, MATRIX = torch.zeros(()), torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("result", "found"),
    [
        (SCALAR, r"a tensor of shape \(\)"),
        ((SCALAR,) * 3, r"\(a tensor of shape \(\), a tensor .*\)"),
        ((), r"\(\)"),
        (None, "None"),
        ((0.0, {}), r"\(float, dict\)"),
        ((MATRIX, {}), r"\(a tensor of shape \(2, 3\), dict\)"),
        ((SCALAR, None), r"\(a tensor of shape \(\), None\)"),
        ((SCALAR, SCALAR), r"\(a tensor of shape \(\), a tensor of shape \(\)\)"),
    ],
)
def test_a_loss_that_returns_something_else_is_named(result, found):
    register_policy_loss("odd")(lambda log_prob, loss_agg_mode: result)
    columns = {"response_mask": torch.ones(2, 3), "old_log_probs": MATRIX}
    with pytest.raises(ValueError, match=rf"loss 'odd': expected \(scalar tensor, dict of metrics\), found {found}: "):
        actor_loss(
            {"log_probs": MATRIX}, columns, loss_mode="odd", settings={}, agg=LossAggregation("token-mean", 6, 2)
        )
