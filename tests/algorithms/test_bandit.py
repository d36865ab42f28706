"""A softmax bandit with three arms: the expected policy gradient of an estimator, exactly, by enumeration.

The gradient that a step would take is averaged over every possible group of responses, each with its probability, and
compared with the gradient of the expected reward.
"""

import itertools

import pytest
import torch

from verl.algorithms import LossAggregation, get_adv_estimator_fn, get_policy_loss_fn

REWARDS = torch.tensor([0.0, 0.2, 1.0], dtype=torch.float64)
THETA = torch.tensor([0.3, -0.5, -0.1], dtype=torch.float64)


def exact_gradient():
    theta = THETA.clone().requires_grad_()
    return torch.autograd.grad((torch.softmax(theta, -1) * REWARDS).sum(), theta)[0]


def expected_gradient(name, group_size, loss_name="vanilla", **settings):
    """E[-gradient of the loss] over all groups of `group_size` arms, at the policy that drew them."""
    theta = THETA.clone().requires_grad_()
    log_pi = torch.log_softmax(theta, -1)
    groups = torch.tensor(list(itertools.product(range(3), repeat=group_size)))  # (groups, n)
    arms = groups.flatten()
    chance = log_pi.detach()[groups].sum(-1).exp()
    assert chance.sum() == pytest.approx(1)

    mask = torch.ones(len(arms), 1)
    uid = torch.arange(len(groups)).repeat_interleave(group_size)
    advantages, _ = get_adv_estimator_fn(name)(REWARDS[arms, None], mask, uid, **settings)
    # Each group as a batch of its own, times its probability: the weight of its advantages.
    weighted = advantages * chance[uid][:, None]
    log_prob = log_pi[arms, None]
    one_group = LossAggregation("token-mean", group_size, group_size)
    loss, _ = get_policy_loss_fn(loss_name)(log_prob.detach(), log_prob, weighted, mask, one_group)
    return -torch.autograd.grad(loss, theta)[0]


@pytest.mark.parametrize("group_size", [2, 3, 4])
@pytest.mark.parametrize("loss", ["vanilla", "gspo", "geo_mean", "cispo", "sapo", "gpg", "reinforce", "dppo_tv"])
def test_rloo_is_unbiased(group_size, loss):
    torch.testing.assert_close(expected_gradient("rloo", group_size, loss), exact_gradient())


@pytest.mark.parametrize("group_size", [2, 3, 4])
def test_subtracting_the_mean_shrinks_the_gradient_without_turning_it(group_size):
    # The response itself is part of the mean: the factor is (n - 1) / n, which the learning rate absorbs.
    found = expected_gradient("grpo", group_size, norm_adv_by_std_in_grpo=False)
    torch.testing.assert_close(found, exact_gradient() * (group_size - 1) / group_size)


def test_dividing_by_the_standard_deviation_turns_the_gradient():
    found = expected_gradient("grpo", 4)
    cosine = torch.cosine_similarity(found, exact_gradient(), dim=0)
    assert 0.5 < cosine < 0.999
    # With two responses only their order counts: the .2 between arms 0 and 1 weighs as much as the 1 to arm 2.
    pi = torch.softmax(THETA, -1)
    order_only = torch.tensor([-pi[1] - pi[2], pi[0] - pi[2], pi[0] + pi[1]], dtype=torch.float64)
    centred = pi * (order_only - (pi * order_only).sum())
    found = expected_gradient("grpo", 2)
    assert torch.cosine_similarity(found, centred, dim=0) == pytest.approx(1, abs=1e-6)


def test_opo_on_equal_lengths_is_the_group_mean():
    torch.testing.assert_close(expected_gradient("opo", 3), expected_gradient("grpo", 3, norm_adv_by_std_in_grpo=False))


@pytest.mark.parametrize("k", [1, 2, 3])
def test_analytic_passk_points_to_the_gradient_of_pass_at_k(k):
    """Arms are right or wrong, so that the spread, by which it is divided, cannot turn the gradient."""
    theta = THETA.clone().requires_grad_()
    wrong = 1 - torch.softmax(theta, -1)[2]
    (exact,) = torch.autograd.grad(1 - wrong**k, theta)
    found = expected_gradient("analytic_passk", 4, passk_k=k)
    assert torch.cosine_similarity(found, exact, dim=0) == pytest.approx(1, abs=1e-6)


def test_grpo_passk_climbs_the_best_of_the_group():
    """Without the division its gradient is that of E[max of n rewards], divided by n."""
    theta = THETA.clone().requires_grad_()
    pi = torch.softmax(theta, -1)
    groups = torch.tensor(list(itertools.product(range(3), repeat=3)))
    best_of_three = (pi[groups].prod(-1) * REWARDS[groups].amax(-1)).sum()
    (exact,) = torch.autograd.grad(best_of_three, theta)
    found = expected_gradient("grpo_passk", 3, norm_adv_by_std_in_grpo=False)
    torch.testing.assert_close(found, exact / 3)
