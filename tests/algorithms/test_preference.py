"""The preference losses by hand in float64, and the loss and rewards of PRIME."""

import math
from functools import partial

import pytest
import torch

from tests.algorithms.merging import merge_metrics
from verl.algorithms.preference import (
    PREFERENCE_LOSSES,
    PairTerms,
    PreferenceLoss,
    register_preference_loss,
    sequence_log_prob,
)
from verl.algorithms.prime import implicit_process_rewards, prime_loss


def rows(n=5, seed=0):
    """Columns of n pairs, or of 2n labeled responses, without a tie."""
    draw = partial(torch.rand, 2 * n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return {
        "log_prob": -5 * draw(),
        "ref_log_prob": -5 * draw(),
        "length": torch.tensor([3, 5] * n),
        "label": torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0] * 2)[: 2 * n].double(),
        "margin": draw().repeat_interleave(2)[: 2 * n],
        "pair_weight": torch.ones(2 * n),
    }


def log_sigmoid(x):
    return -math.log(1 + math.exp(-x))


def log_odds(mean):
    return math.log(math.exp(mean) / (1 - math.exp(mean)))


def pair_by_hand(name, c, r, rc, rr, nc, nr, margin, beta=None, label_smoothing=0.0, gamma=1.0, center_coef=0.0):
    """Loss, reward of the chosen and of the rejected response, of one pair, from the formulas of the papers."""
    beta = beta or {"simpo": 2.0}.get(name, 0.1)
    if name in ("dpo", "ipo"):
        h = (c - rc) - (r - rr)
        losses = {
            "dpo": -(1 - label_smoothing) * log_sigmoid(beta * h) - label_smoothing * log_sigmoid(-beta * h),
            "ipo": (h - 1 / (2 * beta)) ** 2,
        }
        return losses[name], beta * (c - rc), beta * (r - rr)
    if name == "simpo":
        return -log_sigmoid(beta / nc * c - beta / nr * r - gamma), beta * c / nc, beta * r / nr
    if name == "orpo":
        ratio = log_odds(c / nc) - log_odds(r / nr)
        return -c / nc - beta * log_sigmoid(ratio), beta * c / nc, beta * r / nr
    return -log_sigmoid(c - r - margin) + center_coef * (c + r) ** 2, c, r


PAIRED = [
    ("dpo", {}),
    ("dpo", {"beta": 0.5, "label_smoothing": 0.2}),
    ("ipo", {"beta": 0.3}),
    ("simpo", {"gamma": 0.5}),
    ("orpo", {"beta": 0.7}),
    ("bradley_terry", {"center_coef": 0.01}),
]


@pytest.mark.parametrize(("name", "settings"), PAIRED)
def test_losses_of_pairs_by_hand(name, settings):
    columns, results = rows(), []
    for i in range(0, 10, 2):
        policy, reference, lengths = (columns[n][i : i + 2].tolist() for n in ("log_prob", "ref_log_prob", "length"))
        results.append(pair_by_hand(name, *policy, *reference, *lengths, columns["margin"][i].item(), **settings))
    losses, better, worse = zip(*results)
    loss, metrics = PreferenceLoss(name, settings)(columns, 5)
    assert loss.item() == pytest.approx(sum(losses) / 5, rel=1e-12)
    assert merge_metrics([metrics]) == pytest.approx(
        {
            "rewards/chosen": sum(better) / 5,
            "rewards/rejected": sum(worse) / 5,
            "rewards/accuracies": sum(b > w for b, w in zip(better, worse)) / 5,
            "rewards/margins": sum(b - w for b, w in zip(better, worse)) / 5,
        }
    )


def test_kto_by_hand():
    columns, total, kl, beta = rows(), 0.0, 0.7, 0.3
    for log_prob, reference, label in zip(*(columns[n].tolist() for n in ("log_prob", "ref_log_prob", "label"))):
        h = beta * (log_prob - reference - kl)
        total += 1.5 * (1 - 1 / (1 + math.exp(-h))) if label else 0.5 * (1 - 1 / (1 + math.exp(h)))
    settings = {"beta": beta, "desirable_weight": 1.5, "undesirable_weight": 0.5}
    loss, metrics = PreferenceLoss("kto", settings)(columns, 10, kl)
    assert loss.item() == pytest.approx(total / 10, rel=1e-12)
    rewards, good = beta * (columns["log_prob"] - columns["ref_log_prob"]), columns["label"].bool()
    expected = {"rewards/chosen": rewards[good].mean().item(), "rewards/rejected": rewards[~good].mean().item()}
    assert merge_metrics([metrics]) == pytest.approx(expected)


@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
def test_the_gradient_by_finite_differences(name):
    columns = rows()

    def loss(log_prob):
        return PreferenceLoss(name)({**columns, "log_prob": log_prob}, 5, 0.2)[0]

    torch.autograd.gradcheck(loss, columns["log_prob"].clone().requires_grad_())


@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
def test_shares_add_up_and_rows_of_weight_zero_do_not_count(name):
    """Two shares of a mini-batch, one with a row (a pair) of weight 0 whose values are not finite."""
    columns, loss = rows(), PreferenceLoss(name)
    whole, metrics = loss(columns, 10)
    ignored = {key: torch.full((2,), math.nan) if key != "label" else torch.ones(2) for key in columns}
    ignored["pair_weight"] = torch.zeros(2)
    first = {key: torch.cat([value[:4], ignored[key].to(value)]) for key, value in columns.items()}
    shares = [loss(first, 10), loss({key: value[4:] for key, value in columns.items()}, 10)]
    torch.testing.assert_close(sum(share for share, _ in shares), whole)
    assert merge_metrics([each for _, each in shares]) == pytest.approx(merge_metrics([metrics]))


def test_the_signature_says_what_a_loss_needs():
    needs = {name: PreferenceLoss(name) for name in PREFERENCE_LOSSES}
    assert {name for name, loss in needs.items() if loss.needs_reference} == {"dpo", "ipo", "kto"}
    assert {name for name, loss in needs.items() if not loss.is_paired} == {"kto"}
    assert {name for name, loss in needs.items() if loss.needs_kl} == {"kto"}


def test_extreme_log_probs_stay_finite():
    columns = rows(1) | {"log_prob": torch.tensor([0.0, -1e4]), "ref_log_prob": torch.tensor([-1e4, 0.0])}
    for name in PREFERENCE_LOSSES:
        log_prob = columns["log_prob"].clone().requires_grad_()
        loss, _ = PreferenceLoss(name)({**columns, "log_prob": log_prob}, 1)
        loss.backward()
        assert loss.isfinite() and log_prob.grad.isfinite().all(), name


def test_unusable_losses_are_errors():
    with pytest.raises(ValueError, match="no preference loss is called 'ddpo': did you mean 'dpo'"):
        _ = PreferenceLoss("ddpo")
    with pytest.raises(ValueError, match=r"preference loss ipo has no setting 'gamma': it has beta"):
        PreferenceLoss("ipo", {"gamma": 1.0})
    with pytest.raises(ValueError, match=r"beta: expected float, found 'x'"):
        PreferenceLoss("ipo", {"beta": "x"})
    with pytest.raises(ValueError, match=r"'mine': expected positional parameters out of chosen, .*, found chosen, t"):
        register_preference_loss("mine")(lambda chosen, truth: PairTerms(chosen, chosen, chosen))


def test_sequence_log_prob_reads_no_padding():
    log_probs = torch.tensor([[-1.0, -2, math.nan], [-3, math.nan, math.nan]], requires_grad=True)
    found = sequence_log_prob(log_probs, torch.tensor([[1, 1, 0], [1, 0, 0]]))
    assert found.tolist() == [-3, -3]
    found.sum().backward()
    assert log_probs.grad.tolist() == [[1, 1, 0], [1, 0, 0]]


def test_prime_process_rewards_and_loss():
    log_ratio, mask = torch.tensor([[2.0, -6, 4], [1, 3, 9]]), torch.tensor([[1, 1, 1], [1, 1, 0]])
    plain = implicit_process_rewards(log_ratio, mask, batch_norm=False)
    torch.testing.assert_close(plain, torch.tensor([[0.1, -0.3, 0], [0.05, 0, 0]]))
    # rewards to go: [-.2, -.3, 0] and [.05, 0]
    torch.testing.assert_close(implicit_process_rewards(log_ratio, mask), plain / 0.3)
    loss, _ = prime_loss(log_ratio, torch.tensor([1.0, 0]), mask)  # logits 0 and .2
    assert loss.item() == pytest.approx((math.log(2) + math.log(1 + math.exp(0.2))) / 2)
