"""A softmax bandit with three arms: the expected policy gradient of an estimator, exactly, by enumeration.

The gradient that a step would take is averaged over every possible group of responses, each with its probability, and
compared with the gradient of the expected reward.
"""

import itertools
import math
import statistics

import pytest
import torch

from verl.algorithms import bind_arguments, get_adv_estimator_fn, get_policy_loss_fn

REWARDS = torch.tensor([0.0, 0.2, 1.0], dtype=torch.float64)
THETA = torch.tensor([0.3, -0.5, -0.1], dtype=torch.float64)


def exact_gradient():
    theta = THETA.clone().requires_grad_()
    return torch.autograd.grad((torch.softmax(theta, -1) * REWARDS).sum(), theta)[0]


SETTINGS = {"passk_k": 2, "gdpo_reward_keys": ["acc"]}


def expected_gradient(name, group_size, **settings):
    """E[-gradient of the loss] over all groups of `group_size` arms, at the policy that drew them.

    Each group is a batch of its own; the columns that an estimator may ask for beside the rewards know nothing of them.
    """
    theta = THETA.clone().requires_grad_()
    log_pi = torch.log_softmax(theta, -1)
    pi, ones = log_pi.detach().exp(), torch.ones(group_size, 1, dtype=torch.float64)
    estimator, policy_loss = get_adv_estimator_fn(name), get_policy_loss_fn("vanilla")
    settings = {**SETTINGS, **settings}
    expected, chances = 0.0, 0.0
    for group in itertools.product(range(3), repeat=group_size):
        arms = torch.tensor(group)
        columns = {"token_level_rewards": REWARDS[arms, None], "response_mask": ones, "uid": ["a"] * group_size}
        columns |= {"values": 0.4 * ones, "reward_baselines": 0.3 * ones[:, 0], "sum_pi_squared": (pi**2).sum() * ones}
        columns |= {"rm_scores": 0 * ones, "acc": REWARDS[arms].tolist()}
        log_prob = log_pi[arms, None]
        columns |= dict.fromkeys(("old_log_probs", "old_log_prob", "rollout_log_probs"), log_prob.detach())
        advantages, _ = estimator(**bind_arguments(estimator, columns, settings))
        columns |= {"log_prob": log_prob, "advantages": advantages, "loss_agg_mode": "token-mean"}
        loss, _ = policy_loss(**bind_arguments(policy_loss, columns, settings))
        expected, chances = expected - pi[arms].prod() * loss, chances + pi[arms].prod()
    assert chances == pytest.approx(1)
    return torch.autograd.grad(expected, theta)[0]


def standardised_gradient(group_size):
    """The expected gradient of (reward - mean) / std, by plain loops."""
    pi = torch.softmax(THETA, -1).tolist()
    found = [0.0] * 3
    for group in itertools.product(range(3), repeat=group_size):
        chance = math.prod(pi[arm] for arm in group)
        rewards = [REWARDS[arm].item() for arm in group]
        spread = statistics.stdev(rewards)
        for arm, reward in zip(group, rewards):
            advantage = (reward - statistics.mean(rewards)) / spread if spread else 0.0
            for k in range(3):
                found[k] += chance * advantage * ((k == arm) - pi[k]) / group_size
    return torch.tensor(found, dtype=torch.float64)


# What the expected gradient is, against that of the expected reward. `shrunk`: the response itself is part of the mean,
# so that (n - 1) / n is left, which the learning rate absorbs. `standardised`: divided by the spread of the group or,
# which is the same here, of the batch. `climbs`: another objective, or a baseline that depends on the sampled token.
WITHOUT_STD = {"norm_adv_by_std_in_grpo": False}
EXPECTED = [
    *(("rloo", {}, "exact"), ("rloo_vectorized", {}, "exact"), ("remax", {}, "exact")),
    *(("opo", {}, "shrunk"), ("gpg", {}, "shrunk"), ("grpo", WITHOUT_STD, "shrunk")),
    *((name, {}, "standardised") for name in ("grpo", "grpo_vectorized", "gae", "reinforce_plus_plus")),
    *((name, {}, "standardised") for name in ("reinforce_plus_plus_baseline", "gdpo", "prime")),
    *((name, {}, "climbs") for name in ("sppo", "optimal_token_baseline", "tir_optimal_token_baseline")),
    *((name, {}, "climbs") for name in ("grpo_passk", "analytic_passk")),
]


@pytest.mark.parametrize(("name", "settings", "kind"), EXPECTED)
def test_the_expected_gradient(name, settings, kind):
    exact = exact_gradient()
    for n in (2, 3, 4) if kind in ("exact", "shrunk") else (4,):
        found = expected_gradient(name, n, **settings)
        if kind == "climbs":
            assert torch.cosine_similarity(found, exact, dim=0) > 0.98
        else:
            expected = {"exact": exact, "shrunk": exact * (n - 1) / n, "standardised": standardised_gradient(n)}[kind]
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


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
