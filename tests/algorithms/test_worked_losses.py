"""Worked examples of losses, KL, aggregation and corrections, literally, to six digits (most also worked by hand)."""

import math

import pytest
import torch

from verl.algorithms import (
    LOSS_AGG_MODES,
    POLICY_LOSS_REGISTRY,
    agg_loss,
    core_algos,
    get_kl_controller,
    get_policy_loss_fn,
    kl_penalty,
    losses,
    merge_metrics,
    preference,
)
from verl.algorithms import rollout_correction as correction
from verl.algorithms.kl import KL_KINDS


def close(found, expected):
    torch.testing.assert_close(
        torch.as_tensor(found, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1.5e-6
    )


OLD = torch.full((2, 2), -1.0)
NEW = torch.tensor([[-0.8, -1.0], [-1.5, -1.1]])
ADVANTAGES = torch.tensor([[1.0, 1], [-1, -1]])


def run(name, mode="token-mean", **settings):
    """(loss, gradient, merged metrics) of a policy loss on the tensors above."""
    log_prob = NEW.clone().requires_grad_()
    loss, metrics = get_policy_loss_fn(name)(OLD, log_prob, ADVANTAGES, torch.ones(2, 2), mode, **settings)
    loss.backward()
    return loss.detach(), log_prob.grad, merge_metrics([metrics])


# (registered name, settings, loss, its gradient)
POLICY_LOSSES = [
    ("vanilla", {}, -0.123791, [[0, -0.25], [0, 0.226209]]),
    ("vanilla", {"clip_ratio_high": 0.28}, -0.129141, [[-0.305351, -0.25], [0, 0.226209]]),
    (
        "vanilla",
        {"rollout_is_weights": torch.tensor([[1.0, 2], [0.5, 1]])},
        -0.473791,
        [[0, -0.5], [0, 0.226209]],
    ),
    ("gspo", {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2}, -0.152585, [[-0.276293] * 2, [0, 0]]),
    ("gspo", {}, -0.00035, [[0, 0], [0, 0]]),
    ("geo_mean", {}, -0.163185, [[-0.276293] * 2, [0, 0.1947]]),
    (
        "geo_mean",
        {"clip_ratio_low": 0.2, "clip_ratio_high": 0.15},
        -0.108588,
        [[0, -0.269471], [0, 0.215177]],
    ),
    ("cispo", {"clip_ratio_low": 0.2}, -0.05883, [[-0.3, -0.25], [0.2, 0.226209]]),
    ("sapo", {}, -0.223507, [[-0.301639, -0.25], [0.145342, 0.225646]]),
    ("gpg", {}, -0.2, [[-0.25, -0.25], [0.25, 0.25]]),
    ("kl_cov", {"kl_cov_ratio": 0.25}, -0.052509, [[-0.305351, -0.25], [-0.098367, 0.226209]]),
    (
        "clip_cov",
        {"clip_ratio": 0.5, "clip_cov_ratio": 0.5, "clip_cov_lb": 0.2},
        -0.023791,
        [[0, -0.25], [0, 0.226209]],
    ),
    ("dppo_tv", {"clip_ratio_low": 0.05, "clip_ratio_high": 0.05}, 0.00117, [[0, -0.25], [0, 0.226209]]),
    ("dro", {"dro_beta": 0.5}, -0.18125, [[-0.225, -0.25], [0.1875, 0.2375]]),
    # Bernoulli KL(p_old || p) by hand: .0136 for token (0, 0), .0536 for (1, 0), .0027 for (1, 1); bound .05.
    ("dppo_kl", {}, 0.245450, [[-0.305351, -0.25], [0, 0.226209]]),
    ("reinforce", {}, -0.2, [[-0.25, -0.25], [0.25, 0.25]]),
    ("bypass_mode", {}, -0.123791, [[0, -0.25], [0, 0.226209]]),
    # By hand: weights pi_old / pi_rollout 1.221403, 1, 1 and e, cut at 2, times vanilla's -1.2, -1, .8, .904837.
    (
        "decoupled_ppo",
        {"rollout_log_probs": torch.tensor([[-1.2, -1], [-1, -2]])},
        0.035998,
        [[0, -0.25], [0, 0.452419]],
    ),
]


@pytest.mark.parametrize("name, settings, loss, gradient", POLICY_LOSSES)
def test_policy_losses(name, settings, loss, gradient):
    found, found_gradient, _ = run(name, **settings)
    close(found, loss)
    close(found_gradient, gradient)


def test_policy_loss_metrics():
    _, _, metrics = run("vanilla")
    close(metrics["actor/pg_clipfrac"], 0.5)
    close(metrics["actor/ppo_kl"], 0.1)
    assert metrics["actor/pg_clipfrac_lower"] == 0
    assert run("vanilla", clip_ratio_high=0.28)[2]["actor/pg_clipfrac"] == 0.25
    assert run("clip_cov", clip_ratio=0.5, clip_cov_ratio=0.5, clip_cov_lb=0.2)[2]["actor/pg_clipfrac"] == 0.5
    assert run("kl_cov", kl_cov_ratio=0.25)[2]["actor/kl_cov_fraction"] == 0.25


@pytest.mark.parametrize(
    "advantage, ratio, loss, gradient",
    [
        (1, 1.5, -1.2, 0),
        (1, 0.5, -0.5, -0.5),
        (-1, 0.5, 0.8, 0),
        (-1, 1.5, 1.5, 1.5),
        (-1, 4, 3.0, 0),  # dual clip
        (1, 1.1, -1.1, -1.1),
        (-1, 0.9, 0.9, 0.9),
    ],
)
def test_truth_table_of_the_clip(advantage, ratio, loss, gradient):
    log_prob = torch.tensor([[math.log(ratio)]], requires_grad=True)
    arguments = (torch.zeros(1, 1), log_prob, torch.tensor([[float(advantage)]]), torch.ones(1, 1))
    found, *_ = core_algos.compute_policy_loss(*arguments)
    found.backward()
    close(found.detach(), loss)
    close(log_prob.grad, [[gradient]])


def test_value_loss():
    vpreds, returns, values = torch.tensor([[1.0, 2, 0]]), torch.tensor([[0.5, 1, 2]]), torch.tensor([[0.2, 1.9, 0.3]])
    loss, clipfrac = core_algos.compute_value_loss(vpreds, returns, values, torch.ones(1, 3), 0.5)
    close(loss, 0.875)
    assert clipfrac == 0
    loss, clipfrac = core_algos.compute_value_loss(vpreds, -returns, values, torch.ones(1, 3), 0.5)
    # By hand: unclipped 2.25, 9, 4; clipped values .7, 2, 0 give 1.44, 9, 4.
    close(loss, 0.5 * 15.25 / 3)


def test_entropy_and_sum_pi_squared():
    logits = torch.tensor([0, math.log(3)])
    close(losses.entropy_from_logits(logits), 0.562335)
    close(losses.entropy_from_logits(torch.zeros(4)), 1.386294)
    close(losses.entropy_from_logits(torch.tensor([0, -torch.inf, 0])), math.log(2))
    close(losses.sum_pi_squared_from_logits(logits), 0.625)


def test_sft_nll():
    loss, metrics = losses.sft_nll(torch.tensor([[-1.0, -3, -5]]), torch.tensor([[0, 1, 1]]))
    close(loss, 4)
    assert merge_metrics([metrics]) == {"train/nll": 4}


AGGREGATIONS = [
    ("token-mean", None, 3.6),
    ("seq-mean-token-sum", None, 9),
    ("seq-mean-token-mean", None, 3.25),
    ("seq-mean-token-sum-norm", None, 3),
    ("seq-mean-token-sum-norm", 10, 0.9),
    ("token-sum", None, 18),
]


@pytest.mark.parametrize("mode, scale, expected", AGGREGATIONS)
def test_aggregation(mode, scale, expected):
    x, mask = torch.tensor([[1.0, 2, 3], [4, 5, 6]]), torch.tensor([[1, 1, 0], [1, 1, 1]])
    close(agg_loss(x, mask, mode, loss_scale_factor=scale), expected)
    close(agg_loss(x, mask, mode, dp_size=4, loss_scale_factor=scale), 4 * expected)


@pytest.mark.parametrize("mode, expected", [("token-mean", 5), ("seq-mean-token-sum", 15), ("seq-mean-token-mean", 5)])
def test_aggregation_does_not_count_empty_rows(mode, expected):
    close(agg_loss(torch.tensor([[1.0, 2, 3], [4, 5, 6]]), torch.tensor([[0, 0, 0], [1, 1, 1]]), mode), expected)


KL = [  # d = log_prob - ref = .5: (kind, value, gradient)
    ("k1", 0.5, 1),
    ("kl", 0.5, 1),
    ("abs", 0.5, 1),
    ("k2", 0.125, 0.5),
    ("mse", 0.125, 0.5),
    ("k3", 0.106531, 0.393469),
    ("low_var_kl", 0.106531, 0.393469),
    ("k1+", 0.5, 0.5),
    ("kl+", 0.5, 0.5),
    ("abs+", 0.5, 0.5),
    ("k2+", 0.125, 0.5),
    ("mse+", 0.125, 0.5),
    ("k3+", 0.106531, 0.5),
    ("low_var_kl+", 0.106531, 0.5),
]


@pytest.mark.parametrize("kind, value, gradient", KL)
def test_kl_penalty(kind, value, gradient):
    log_prob = torch.tensor([[-1.0]], requires_grad=True)
    found = kl_penalty(log_prob, torch.tensor([[-1.5]]), kind)
    found.sum().backward()
    close(found.detach(), [[value]])
    close(log_prob.grad, [[gradient]])


def test_adaptive_kl_controller():
    controller = get_kl_controller("adaptive", kl_coef=0.1, target_kl=6, horizon=10000)
    controller.update(12, 256)
    close(controller.value, 0.100512)
    controller.update(5.7, 256)
    close(controller.value, 0.1003833)


RATIOS = torch.tensor([[1.5, 3, 1], [0.5, 0.8, 1]]).log()
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])


@pytest.mark.parametrize(
    "level, normalise, expected",
    [
        ("token", False, [[1.5, 2, 1], [0.5, 0.8, 0]]),
        ("token", True, [[1.293103, 1.724138, 0.862069], [0.431034, 0.689655, 0]]),
        ("sequence", False, [[2, 2, 2], [0.4, 0.4, 0]]),
        ("sequence", True, [[1.666667] * 3, [0.333333, 0.333333, 0]]),
    ],
)
def test_truncated_importance_weights(level, normalise, expected):
    weights, metrics = correction.compute_rollout_correction_weights(RATIOS, MASK, level, 2.0, normalise)
    close(weights, expected)
    if level == "token":
        close(metrics["rollout_corr/rollout_is_eff_sample_size"], 1.16**2 / 1.628)  # .82654


@pytest.mark.parametrize(
    "option, bound, kept",
    [
        ("token_k1", "0.5_2", [[1, 0, 1], [1, 1, 0]]),
        ("token_k2", 0.2, [[1, 0, 1], [0, 1, 0]]),
        ("token_k3", 0.3, [[1, 0, 1], [1, 1, 0]]),
        ("seq_sum_k1", "0.5_2", [[0, 0, 0], [0, 0, 0]]),
        ("seq_mean_k1", "0.5_2", [[1, 1, 1], [1, 1, 0]]),
        ("seq_mean_k3", 0.2, [[0, 0, 0], [1, 1, 0]]),
        ("seq_max_k2", 0.3, [[0, 0, 0], [1, 1, 0]]),
        # pi_train / pi_rollout is 1.65 and .63 on average: bounds on the inverse would keep the first row instead.
        ("seq_mean_k1", "0.6_1.2", [[0, 0, 0], [1, 1, 0]]),
    ],
)
def test_rejection(option, bound, kept):
    found, _ = correction.compute_rollout_rejection_mask(RATIOS, MASK, option, bound)
    assert found.tolist() == kept


def test_offpolicy_metrics():
    old, rollout = torch.tensor([[-1.0, -2], [-0.5, -1]]), torch.tensor([[-1.2, -2], [-0.5, -1.5]])
    found = correction.compute_offpolicy_metrics(old, rollout, torch.ones(2, 2))
    expected = {
        "kl": -0.175,
        "k3_kl": 0.042531,
        "training_ppl": 3.299345,
        "rollout_ppl": 3.835657,
        "chi2_token": 0.552527,
        "chi2_seq": 1.105053,
        "ppl_ratio": 0.841819,
    }
    for name, value in expected.items():
        close(found[f"rollout_corr/{name}"], value)


def test_dpo_and_ipo():
    h = tuple(torch.tensor([x]) for x in (-10.0, -14.0, -11.0, -12.0))
    close(preference.dpo_loss(*h, beta=0.1)[0], 0.554355)
    close(preference.dpo_loss(*h, beta=0.1, label_smoothing=0.1)[0], 0.584355)
    close(preference.dpo_loss(*h, beta=0.1, loss_type="ipo")[0], 4)


def test_sppo_loss():
    log_prob, advantages = torch.tensor([[-1.0, -0.5]]), torch.full((1, 2), 0.379885)
    loss, _ = preference.sppo_loss(torch.tensor([[-1.3, -0.7]]), log_prob, advantages, torch.ones(1, 2))
    close(loss, 0.014428)


def test_bradley_terry():
    chosen, rejected = torch.tensor([2.0]), torch.tensor([0.5])
    close(preference.bradley_terry_loss(chosen, rejected)[0], 0.201413)
    close(preference.bradley_terry_loss(chosen, rejected, margin=1.5)[0], math.log(2))
    close(preference.bradley_terry_loss(chosen, rejected, center_coef=0.1)[0], 0.201413 + 0.425)


def test_everything_has_an_example():
    """A loss, a KL or an aggregation that is new comes with figures worked out for it."""
    assert {name for name, *_ in POLICY_LOSSES} | {"sppo"} == set(POLICY_LOSS_REGISTRY)  # sppo: test_sppo_loss
    assert {kind for kind, *_ in KL} == {kind + plus for kind in KL_KINDS if kind != "full" for plus in ("", "+")}
    assert {mode for mode, *_ in AGGREGATIONS} == set(LOSS_AGG_MODES)
