"""Worked examples of the estimators, literally, to six digits (most of them also worked by hand)."""

import math

import numpy as np
import pytest
import torch

from verl.algorithms import advantages, core_algos, preference, prime, token_baselines
from verl.algorithms.advantages import ADV_ESTIMATOR_REGISTRY
from verl.algorithms.masked import masked_whiten


def close(found, expected):
    torch.testing.assert_close(
        torch.as_tensor(found, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1.5e-6
    )


def uids(text):
    return np.array(list(text), dtype=object)


def rows(*lengths_and_rewards, width=4):
    """Outcome rewards on the last token: (length, reward) per row -> token_level_rewards, response_mask."""
    rewards = torch.zeros(len(lengths_and_rewards), width)
    mask = torch.zeros(len(lengths_and_rewards), width, dtype=torch.long)
    for row, (length, reward) in enumerate(lengths_and_rewards):
        rewards[row, length - 1] = reward
        mask[row, :length] = 1
    return rewards, mask


def test_gae():
    rewards, mask, values = torch.tensor([[0.0, 0, 1]]), torch.ones(1, 3), torch.tensor([[0.5, 0.6, 0.7]])
    found, returns = core_algos.compute_gae_advantage_return(rewards, values, mask, 1.0, 0.5)
    close(returns - values, [[0.225, 0.25, 0.3]])
    close(returns, [[0.725, 0.85, 1]])
    close(found, [[-0.872868, -0.218218, 1.091086]])


def test_gae_steps_over_tokens_outside_the_mask():
    rewards, mask, values = torch.tensor([[0.0, 0, 1]]), torch.tensor([[1, 0, 1]]), torch.tensor([[0.5, 9, 0.7]])
    found, returns = core_algos.compute_gae_advantage_return(rewards, values, mask, 1.0, 1.0)
    close(returns, [[1, 0, 1]])
    close((returns - values)[mask.bool()], [0.5, 0.3])
    close(found, [[0.707107, 0, -0.707107]])


def test_whiten_shifts_padding_too():
    close(masked_whiten(torch.tensor([[1.0, 2, 3, 100]]), torch.tensor([[1, 1, 1, 0]])), [[-1, 0, 1, 98]])


@pytest.mark.filterwarnings("ignore:.*prompts have fewer than")
def test_grpo_drgrpo_rloo():
    rewards, mask = rows((1, 1), (2, 0), (3, 0), (4, 1), (1, 0.7))
    index = uids("aaaab")
    found, _ = core_algos.compute_grpo_outcome_advantage(rewards, mask, index)
    close(found[:, 0], [0.866024, -0.866024, -0.866024, 0.866024, 0])  # alone: 0 here, .699999 elsewhere
    close(found, (found[:, :1] * mask).tolist())
    found, _ = core_algos.compute_grpo_outcome_advantage(rewards, mask, index, norm_adv_by_std_in_grpo=False)
    close(found[:, 0], [0.5, -0.5, -0.5, 0.5, 0])
    found, _ = core_algos.compute_rloo_outcome_advantage(rewards, mask, index)
    close(found[:, 0], [0.666667, -0.666667, -0.666667, 0.666667, 0])


def test_grpo_all_equal():
    found, _ = core_algos.compute_grpo_outcome_advantage(*rows((1, 1), (2, 1)), uids("aa"))
    close(found, [[0.0] * 4] * 2)


def test_opo():
    found, _ = core_algos.compute_opo_outcome_advantage(*rows((1, 1), (2, 1), (3, 0), (4, 0)), uids("aaaa"))
    close(found[:, 0], [0.7, 0.7, -0.3, -0.3])


def test_gpg_counts_samples_with_an_advantage():
    found, _ = core_algos.compute_gpg_outcome_advantage(
        *rows((1, 1), (2, 0), (3, 0), (4, 1), (1, 0), (1, 0)), uids("aaaabb")
    )
    # Four of six samples have an advantage: alpha 6/4. Counting non-zero rewards (6/2) would give 1.5.
    close(found[:, 0], [0.75, -0.75, -0.75, 0.75, 0, 0])
    close(found[:, 0] * 2, [1.5, -1.5, -1.5, 1.5, 0, 0])


def test_passk():
    arguments = (*rows((1, 3), (2, 1), (3, 2), (4, 0)), uids("aaaa"))
    found, _ = core_algos.compute_grpo_passk_outcome_advantage(*arguments, config={"norm_adv_by_std_in_grpo": False})
    close(found[:, 0], [1, 0, 0, 0])
    found, _ = core_algos.compute_grpo_passk_outcome_advantage(*arguments, config={"norm_adv_by_std_in_grpo": True})
    close(found[:, 0], [0.774596, 0, 0, 0])


def test_analytic_passk():
    found, _ = advantages.analytic_passk(*rows((1, 1), (2, 0), (3, 0), (4, 0)), uids("aaaa"), passk_k=2)
    close(found[:, 0], [1, -1 / 3, -1 / 3, -1 / 3])


def test_remax():
    rewards, mask = torch.tensor([[0, 0, 1], [0, 0.5, 0]]), torch.tensor([[1, 1, 1], [1, 1, 0]])
    found, returns = core_algos.compute_remax_outcome_advantage(rewards, torch.tensor([0.4, 0.2]), mask)
    close(found, [[0.6, 0.6, 0.6], [0.3, 0.3, 0]])
    close(returns, [[1, 1, 1], [0.5, 0.5, 0]])


def test_reinforce_plus_plus():
    rewards, mask = torch.tensor([[0.0, 0, 1], [0, -1, 0]]), torch.tensor([[1, 1, 1], [1, 1, 0]])
    found, returns = advantages.reinforce_plus_plus(rewards, mask, gamma=0.5)
    close(returns, [[0.25, 0.5, 1], [-0.5, -1, 0]])
    close(found, [[0.25049, 0.563602, 1.189826], [-0.688847, -1.315071, 0]])


def test_reinforce_plus_plus_carries_the_return_through_tool_output():
    _, returns = advantages.reinforce_plus_plus(torch.tensor([[0.0, 0, 1]]), torch.tensor([[1, 0, 1]]))
    close(returns, [[1, 0, 1]])


def test_reinforce_plus_plus_baseline():
    found, _ = core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage(
        *rows((2, 1), (1, 0), width=2), uids("aa")
    )
    close(found, [[0.57735, 0.57735], [-1.154701, 0]])


def test_gdpo():
    columns = {"acc": [1, 1, 0, 0], "fmt": np.array([0, 10, 0, 0], dtype=object)}
    total, mask = torch.tensor([[0, 1.0], [0, 11], [0, 0], [0, 0]]), torch.ones(4, 2)
    found, _ = advantages.gdpo(total, mask, uids("aaaa"), columns, gdpo_reward_keys=["acc", "fmt"])
    close(found, [[x, x] for x in (0.222589, 1.438844, -0.830717, -0.830717)])
    found, _ = advantages.grpo(total, mask, uids("aaaa"))
    close(found[:, 0], [-0.373544, 1.494174, -0.560315, -0.560315])


TOKENS = dict(
    token_level_rewards=torch.tensor([[0.0, 1], [0, 0]]),
    response_mask=torch.ones(2, 2),
    uid=uids("aa"),
    old_log_probs=torch.tensor([[0.5, 0.5], [0.8, 0.5]]).log(),
    sum_pi_squared=torch.tensor([[0.5, 0.5], [0.68, 0.5]]),
)


def test_optimal_token_baseline():
    # W = [.5, 1] and [.08, .58]; B = .5 / .58 and 1 / 1.58
    found, returns = token_baselines.optimal_token_baseline(**TOKENS)
    close(found, [[0.137931, 0.367089], [-0.862069, -0.632911]])
    close(returns, [[1, 1], [0, 0]])


def test_tir_optimal_token_baseline_aligns_the_policys_own_tokens():
    def with_gap(x, filler):  # row 0 gets tool output in the middle, row 1 padding at the end
        return torch.stack([torch.stack([x[0, 0], filler, x[0, 1]]), torch.stack([x[1, 0], x[1, 1], filler])])

    nan = torch.tensor(torch.nan)
    columns = {name: with_gap(x, nan) for name, x in TOKENS.items() if name not in ("uid", "response_mask")}
    mask = torch.tensor([[1, 0, 1], [1, 1, 0]])
    found, _ = core_algos.compute_multi_turn_optimal_token_baseline_advantage(
        response_mask=mask, index=TOKENS["uid"], **columns
    )
    close(found, [[0.137931, 0, 0.367089], [-0.862069, -0.632911, 0]])


def test_prime():
    arguments = dict(
        token_level_rewards=torch.tensor([[0, 1.0], [0, 0]]),
        response_mask=torch.tensor([[1, 1], [1, 0]]),
        uid=uids("aa"),
        rm_scores=torch.tensor([[0.2, 0.4], [-0.1, 0]]),
    )
    found, returns = prime.prime(**arguments)
    close(returns, [[9, 8], [-7, 0]])
    mean, std = 10 / 3, math.sqrt(((9 - 10 / 3) ** 2 + (8 - 10 / 3) ** 2 + (-7 - 10 / 3) ** 2) / 2)
    close(found, [[(9 - mean) / std, (8 - mean) / std], [(-7 - mean) / std, 0]])
    _, returns = prime.prime(**arguments, reward_gt_coef=0.0, reward_dpo_coef=1.0)
    close(returns, [[0.8, 0.6], [-0.4, 0]])


def test_prime_process_rewards_and_loss():
    log_ratio, mask = torch.tensor([[2.0, -6, 4], [1, 3, 9]]), torch.tensor([[1, 1, 1], [1, 1, 0]])
    close(prime.implicit_process_rewards(log_ratio, mask, batch_norm=False), [[0.1, -0.3, 0], [0.05, 0, 0]])
    # rewards to go: [-.2, -.3, 0] and [.05, 0]
    close(prime.implicit_process_rewards(log_ratio, mask), [[1 / 3, -1, 0], [1 / 6, 0, 0]])
    loss, _ = prime.prime_loss(log_ratio, torch.tensor([1.0, 0]), mask)  # logits 0 and .2
    close(loss, (math.log(2) + math.log(1 + math.exp(0.2))) / 2)


def test_sppo():
    found, _ = preference.sppo(torch.tensor([[1.0], [0]]), torch.ones(2, 1), uids("aa"))
    close(found, [[0.379885], [-0.620115]])


EXAMPLES = {
    "gae": test_gae,
    "grpo": test_grpo_drgrpo_rloo,
    "grpo_vectorized": test_grpo_drgrpo_rloo,
    "grpo_passk": test_passk,
    "analytic_passk": test_analytic_passk,
    "rloo": test_grpo_drgrpo_rloo,
    "rloo_vectorized": test_grpo_drgrpo_rloo,
    "remax": test_remax,
    "reinforce_plus_plus": test_reinforce_plus_plus,
    "reinforce_plus_plus_baseline": test_reinforce_plus_plus_baseline,
    "opo": test_opo,
    "gpg": test_gpg_counts_samples_with_an_advantage,
    "gdpo": test_gdpo,
    "optimal_token_baseline": test_optimal_token_baseline,
    "tir_optimal_token_baseline": test_tir_optimal_token_baseline_aligns_the_policys_own_tokens,
    "prime": test_prime,
    "sppo": test_sppo,
}


@pytest.mark.filterwarnings("ignore:.*prompts have fewer than")
@pytest.mark.parametrize("name", ADV_ESTIMATOR_REGISTRY)
def test_every_estimator_has_an_example(name):
    """An estimator that is new comes with figures worked out for it."""
    EXAMPLES[name]()
