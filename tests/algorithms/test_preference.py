"""DPO, IPO, pairs for online DPO, and the loss and rewards of PRIME."""

import math

import pytest
import torch

from tests.algorithms.merging import merge_metrics
from verl.algorithms.prime import implicit_process_rewards, prime_loss
from verl.recipe.dpo.losses import dpo_loss, select_pairs, sequence_log_prob


def pairs(n=5):
    generator = torch.Generator().manual_seed(0)
    return [-5 * torch.rand(n, generator=generator, dtype=torch.float64) for _ in range(4)]


def log_sigmoid(x):
    return -math.log(1 + math.exp(-x))


@pytest.mark.parametrize("settings", [{}, {"label_smoothing": 0.2}, {"loss_type": "ipo"}, {"beta": 0.5}])
def test_dpo_equals_the_loop(settings):
    beta, s = settings.get("beta", 0.1), settings.get("label_smoothing", 0.0)
    total, sums = 0.0, torch.zeros(4, dtype=torch.float64)
    for chosen, rejected, ref_chosen, ref_rejected in zip(*(x.tolist() for x in pairs())):
        h = (chosen - rejected) - (ref_chosen - ref_rejected)
        sums += torch.tensor([h > 0, beta * h, beta * (chosen - ref_chosen), beta * (rejected - ref_rejected)])
        if settings.get("loss_type") == "ipo":
            total += (h - 1 / (2 * beta)) ** 2
        else:
            total += -(1 - s) * log_sigmoid(beta * h) - s * log_sigmoid(-beta * h)
    loss, metrics = dpo_loss(*pairs(), **settings)
    assert loss.item() == pytest.approx(total / 5)
    names = ("accuracy", "margin", "reward_chosen", "reward_rejected")
    expected = {f"dpo/{name}": value / 5 for name, value in zip(names, sums.tolist())}
    assert merge_metrics([metrics]) == pytest.approx(expected)


@pytest.mark.parametrize("settings", [{}, {"label_smoothing": 0.2}, {"loss_type": "ipo"}])
def test_dpo_gradient_by_finite_differences(settings):
    chosen, *rest = pairs()
    torch.autograd.gradcheck(lambda x: dpo_loss(x, *rest, **settings)[0], chosen.requires_grad_())


def test_parts_of_a_mini_batch_add_up():
    whole, metrics = dpo_loss(*pairs())
    parts = [dpo_loss(*(x.split([1, 4])[i] for x in pairs()), num_pairs=5) for i in range(2)]
    torch.testing.assert_close(sum(loss for loss, _ in parts), whole)
    assert merge_metrics([m for _, m in parts]) == pytest.approx(merge_metrics([metrics]))


def test_dpo_names_its_losses():
    with pytest.raises(ValueError, match="no DPO loss is called 'sigmiod': did you mean 'sigmoid'"):
        dpo_loss(*pairs(), loss_type="sigmiod")


def test_sequence_log_prob_reads_no_padding():
    log_probs = torch.tensor([[-1.0, -2, math.nan], [-3, math.nan, math.nan]], requires_grad=True)
    found = sequence_log_prob(log_probs, torch.tensor([[1, 1, 0], [1, 0, 0]]))
    assert found.tolist() == [-3, -3]
    found.sum().backward()
    assert log_probs.grad.tolist() == [[1, 1, 0], [1, 0, 0]]


def test_pairs_are_the_best_and_the_worst_of_each_prompt():
    rewards = torch.tensor([0.2, 1.0, 0.9, 0.0, -1.0, 1.0])
    found = select_pairs(rewards, ["a", "b", "a", "b", "a", "b"])
    assert found.chosen.tolist() == [2, 1]  # of b, the first of two equals
    assert found.rejected.tolist() == [4, 3]
    assert found.num_ties == 0


def test_a_zero_variance_group_gives_no_pair():
    found = select_pairs(torch.tensor([1, 1, 0, 1, 0]), ["a", "a", "b", "b", "alone"])
    assert found.chosen.tolist() == [3]
    assert found.rejected.tolist() == [2]
    assert found.num_ties == 2


def test_nan_rewards_are_an_error():
    with pytest.raises(ValueError, match=r"found NaN in rows \[1\]"):
        select_pairs(torch.tensor([0.0, math.nan]), ["a", "a"])


def test_prime_process_rewards_and_loss():
    log_ratio, mask = torch.tensor([[2.0, -6, 4], [1, 3, 9]]), torch.tensor([[1, 1, 1], [1, 1, 0]])
    plain = implicit_process_rewards(log_ratio, mask, batch_norm=False)
    torch.testing.assert_close(plain, torch.tensor([[0.1, -0.3, 0], [0.05, 0, 0]]))
    # rewards to go: [-.2, -.3, 0] and [.05, 0]
    torch.testing.assert_close(implicit_process_rewards(log_ratio, mask), plain / 0.3)
    loss, _ = prime_loss(log_ratio, torch.tensor([1.0, 0]), mask)  # logits 0 and .2
    assert loss.item() == pytest.approx((math.log(2) + math.log(1 + math.exp(0.2))) / 2)
