"""KL estimators, the penalty in the reward and in the loss, and the controllers."""

import math

import pytest
import torch

from tests.algorithms.merging import merge_metrics
from verl.algorithms import LossAggregation, apply_kl_penalty, get_kl_controller, kl_loss, kl_penalty
from verl.algorithms.kl import KL_KINDS

ESTIMATORS = [kind + plus for kind in KL_KINDS if kind != "full" for plus in ("", "+")]


def kl_by_hand(kind, d):
    """(value, slope) of one token, d = log_prob - ref; a `+` has the value of its kind and the slope of k2."""
    value, slope = {
        "k1": (d, 1.0),
        "abs": (abs(d), math.copysign(1.0, d)),
        "k2": (d**2 / 2, d),
        "k3": (math.exp(-d) - 1 + d, 1 - math.exp(-d)),
    }[{"kl": "k1", "mse": "k2", "low_var_kl": "k3"}.get(kind.rstrip("+"), kind.rstrip("+"))]
    return value, d if kind.endswith("+") else slope


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_equals_the_loop(kind):
    generator = torch.Generator().manual_seed(4)
    log_prob, ref = -torch.rand(2, 3, 4, generator=generator, dtype=torch.float64)
    log_prob.requires_grad_()
    found = kl_penalty(log_prob, ref, kind)
    (slopes,) = torch.autograd.grad(found.sum(), log_prob)
    for i in range(3):
        for t in range(4):
            value, slope = kl_by_hand(kind, (log_prob[i, t] - ref[i, t]).item())
            assert found[i, t].item() == pytest.approx(value, rel=1e-12)
            assert slopes[i, t].item() == pytest.approx(slope, rel=1e-12)


def test_full_is_the_sum_over_the_vocabulary():
    generator = torch.Generator().manual_seed(1)
    p, q = torch.randn(2, 2, 3, 7, generator=generator, dtype=torch.float64)
    expected = torch.zeros(2, 3, dtype=torch.float64)
    for i in range(2):
        for t in range(3):
            zp, zq = (sum(math.exp(x) for x in row[i, t].tolist()) for row in (p, q))
            for x, y in zip(p[i, t].tolist(), q[i, t].tolist()):
                expected[i, t] += math.exp(x) / zp * (x - math.log(zp) - y + math.log(zq))
    torch.testing.assert_close(kl_penalty(p, q, "full"), expected)
    torch.testing.assert_close(kl_penalty(p, p + 5, "full"), torch.zeros(2, 3, dtype=torch.float64))
    p[..., 0] = -torch.inf  # a token that cannot occur
    assert torch.isfinite(kl_penalty(p, q, "full")).all()


def test_k3_is_bounded():
    assert kl_penalty(torch.tensor([-100.0]), torch.tensor([0.0]), "k3") == 10


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_bfloat16_is_computed_in_float32(kind):
    assert kl_penalty(torch.zeros(2).bfloat16(), torch.ones(2).bfloat16(), kind).dtype == torch.float32


@pytest.mark.parametrize("kind", ["k4", "full+", "+", "K1", ""])
def test_unknown_kinds_list_the_known(kind):
    with pytest.raises(ValueError, match=r"no KL estimator is called .*low_var_kl"):
        kl_penalty(torch.zeros(1), torch.zeros(1), kind)


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_kl_loss_reads_no_padding_and_adds_up(kind):
    generator = torch.Generator().manual_seed(2)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1]])
    nan = torch.tensor(torch.nan, dtype=torch.float64)
    log_prob, ref = (
        torch.where(mask.bool(), x, nan) for x in -torch.rand(2, 3, 3, generator=generator, dtype=torch.float64)
    )
    log_prob.requires_grad_()
    aggregation = LossAggregation.from_mask("token-mean", mask)
    loss, metrics = kl_loss(log_prob, ref, mask, aggregation, kl_loss_type=kind)
    (gradient,) = torch.autograd.grad(loss, log_prob)
    assert torch.isfinite(gradient).all()
    assert (gradient[mask == 0] == 0).all()
    order = torch.tensor([2, 0, 1])
    moved, _ = kl_loss(log_prob[order], ref[order], mask[order], aggregation, kl_loss_type=kind)
    torch.testing.assert_close(moved, loss)
    parts = [kl_loss(log_prob[i], ref[i], mask[i], aggregation, kl_loss_type=kind) for i in (slice(0, 2), slice(2, 3))]
    torch.testing.assert_close(sum(part for part, _ in parts), loss)
    assert merge_metrics([m for _, m in parts]) == pytest.approx(merge_metrics([metrics]))
    assert merge_metrics([metrics])["actor/kl_loss"] == pytest.approx(loss.item())


def test_penalty_in_the_reward():
    scores = torch.tensor([[0.0, 1.0, torch.nan], [0.5, torch.nan, torch.nan], [torch.nan] * 3])
    old = torch.tensor([[-1.0, -2.0, torch.nan], [-1.0, torch.nan, torch.nan], [torch.nan] * 3])
    ref = torch.tensor([[-1.5, -1.0, torch.nan], [-4.0, torch.nan, torch.nan], [torch.nan] * 3])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]])
    rewards, kl = apply_kl_penalty(scores, old, ref, mask, kl_coef=0.1, kl_penalty_kind="k1")
    torch.testing.assert_close(rewards, torch.tensor([[-0.05, 1.1, 0], [0.2, 0, 0], [0, 0, 0]]))
    assert kl == pytest.approx((-0.25 + 3) / 2)  # mean over the two responses that have tokens


def test_controllers_keep_their_state():
    adaptive = get_kl_controller("adaptive", 0.1, target_kl=2.0, horizon=100)
    adaptive.update(0.0, 10)
    assert adaptive.value == pytest.approx(0.098)  # 0.1 (1 - 0.2 * 10 / 100): the error is clipped
    again = get_kl_controller("adaptive", 0.1, target_kl=2.0, horizon=100)
    again.load_state_dict(adaptive.state_dict())
    adaptive.update(2.2, 10)
    again.update(2.2, 10)
    assert adaptive.value == again.value == pytest.approx(0.098 * (1 + 0.1 * 0.1))
    fixed = get_kl_controller("fixed", kl_coef=0.2)
    fixed.update(100.0, 10)
    assert fixed.value == 0.2
    assert get_kl_controller().value == 0.001


def test_invalid_controllers_are_errors():
    with pytest.raises(ValueError, match="no KL controller is called 'adaptve': did you mean 'adaptive'"):
        get_kl_controller("adaptve")
    for settings in ({"horizon": 0}, {"target_kl": 0.0}):
        with pytest.raises(ValueError, match="expected target_kl > 0 and horizon > 0"):
            get_kl_controller("adaptive", **settings)
    controller = get_kl_controller("adaptive")
    with pytest.raises(ValueError, match="expected a finite KL, found nan"):
        controller.update(math.nan, 10)
