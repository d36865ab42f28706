"""The functions of public verl's `core_algos`, and custom losses and estimators that were written for it."""

import inspect
import re

import numpy as np
import pytest
import torch

from verl.algorithms import (
    ADV_ESTIMATOR_REGISTRY,
    POLICY_LOSS_REGISTRY,
    LossAggregation,
    bind_arguments,
    core_algos,
    register_adv_est,
    register_policy_loss,
)

REWARDS = torch.tensor([[0.0, 1], [0, 0], [0.5, 0], [0, 2]])
MASK = torch.tensor([[1, 1], [1, 1], [1, 0], [1, 1]])
INDEX = np.array(["a", "a", "b", "b"], dtype=object)
OUTCOME = ("token_level_rewards", "response_mask", "index")
TOKENS = (*OUTCOME, "old_log_probs", "sum_pi_squared", "rollout_is_weights", "handle_zero_tail", "epsilon", "config")


@pytest.mark.parametrize(
    "name, parameters",
    [
        ("gae_advantage_return", ("token_level_rewards", "values", "response_mask", "gamma", "lam")),
        ("grpo_outcome_advantage", (*OUTCOME, "epsilon", "norm_adv_by_std_in_grpo", "config")),
        ("grpo_vectorized_outcome_advantage", (*OUTCOME, "epsilon", "norm_adv_by_std_in_grpo", "config")),
        ("grpo_passk_outcome_advantage", (*OUTCOME, "epsilon", "norm_adv_by_std_in_grpo", "config")),
        ("rloo_outcome_advantage", (*OUTCOME, "epsilon", "config")),
        ("rloo_vectorized_outcome_advantage", (*OUTCOME, "epsilon", "config")),
        ("opo_outcome_advantage", (*OUTCOME, "epsilon", "config")),
        ("reinforce_plus_plus_baseline_outcome_advantage", (*OUTCOME, "epsilon", "config")),
        ("reinforce_plus_plus_outcome_advantage", ("token_level_rewards", "response_mask", "config")),
        ("remax_outcome_advantage", ("token_level_rewards", "reward_baselines", "response_mask", "config")),
        ("gpg_outcome_advantage", (*OUTCOME, "epsilon", "f_norm", "alpha", "config")),
        ("optimal_token_baseline_advantage", TOKENS),
    ],
)
def test_signatures(name, parameters):
    fn = vars(core_algos)[f"compute_{name}"]
    assert tuple(inspect.signature(fn).parameters) == parameters
    columns = {
        "token_level_rewards": REWARDS,
        "response_mask": MASK,
        "index": INDEX,
        "values": REWARDS,
        "reward_baselines": REWARDS[:, 0],
        "old_log_probs": REWARDS - 3,
        "sum_pi_squared": REWARDS / 4,
    }
    settings = {"gamma": 0.5, "lam": 1.0}
    arguments = bind_arguments(fn, columns, settings)
    advantages, returns = fn(**arguments)
    own = ADV_ESTIMATOR_REGISTRY[re.sub("(_outcome)?_advantage(_return)?$", "", name)]
    expected = own(**bind_arguments(own, columns | {"uid": INDEX}, settings))
    assert torch.equal(advantages, expected[0]) and torch.equal(returns, expected[1])


def test_defaults_of_public_verl():
    common = {"epsilon": 1e-6, "norm_adv_by_std_in_grpo": True, "f_norm": 1.0, "alpha": 1.0, "config": None}
    baselines = {"rollout_is_weights": None, "handle_zero_tail": True, "epsilon": 1e-8, "config": None}
    loss = {"loss_agg_mode": "seq-mean-token-sum", "config": None, "rollout_is_weights": None}
    for name in core_algos.__all__:
        parameters = inspect.signature(vars(core_algos)[name]).parameters if name.startswith("compute_") else {}
        defaults = {key: p.default for key, p in parameters.items() if p.default is not p.empty}
        if name.endswith("optimal_token_baseline_advantage"):
            assert defaults == baselines
        elif name.endswith("_outcome_advantage") and "gdpo" not in name:
            assert defaults == {key: value for key, value in common.items() if key in parameters}
        elif name == "compute_policy_loss_reinforce":
            assert defaults == loss


def test_policy_and_value_loss_return_tuples():
    zeros, ones = torch.zeros(1, 2), torch.ones(1, 2)
    loss, clipfrac, kl, lower = core_algos.compute_policy_loss(zeros, torch.tensor([[0.5, 0.0]]), ones, ones)
    assert loss.item() == pytest.approx(-1.1) and (clipfrac, kl, lower) == (0.5, -0.25, 0)
    vpreds, returns, values = torch.tensor([[1.0, 2, 0]]), torch.tensor([[0.5, 1, 2]]), torch.tensor([[0.2, 1.9, 0.3]])
    loss, clipfrac = core_algos.compute_value_loss(vpreds, returns, values, torch.ones(1, 3), 0.5)
    assert loss.item() == pytest.approx(0.875) and clipfrac == 0
    assert core_algos.compute_entropy_loss(torch.zeros(1, 2, 4), ones).item() == pytest.approx(1.386294)


def test_passk_reads_the_config():
    arguments = (REWARDS, MASK, INDEX)
    plain, _ = core_algos.compute_grpo_passk_outcome_advantage(*arguments, config={"norm_adv_by_std_in_grpo": False})
    assert torch.equal(plain, core_algos.compute_grpo_passk_outcome_advantage(*arguments, 1e-6, False)[0])
    assert not torch.equal(plain, core_algos.compute_grpo_passk_outcome_advantage(*arguments)[0])


def test_every_public_name_is_there():
    assert all(name in vars(core_algos) for name in core_algos.__all__)


def test_rewards_less_kl():
    found = core_algos.compute_rewards(REWARDS, torch.full((4, 2), -1.0), torch.full((4, 2), -1.5), 0.1)
    torch.testing.assert_close(found, REWARDS - 0.05)


def test_gdpo_takes_its_settings_from_the_config():
    found, _ = core_algos.compute_gdpo_outcome_advantage(
        REWARDS,
        MASK,
        INDEX,
        config={"gdpo_reward_keys": ["acc"], "gdpo_reward_weights": [2.0]},
        non_tensor_batch={"acc": np.array([1, 0, 0, 1], dtype=object)},
    )
    assert (found.sign()[:, 0] == torch.tensor([1, -1, -1, 1])).all()


def test_reinforce_and_controller():
    loss, _ = core_algos.compute_policy_loss_reinforce(MASK - 2.0, MASK - 2.0, REWARDS, MASK)
    assert loss == (1 + 0 + 0.5 + 2) / 4  # -A log_prob with log_prob -1, summed over tokens, mean over responses

    class Control:
        type, kl_coef = "fixed", 0.3

    assert core_algos.get_kl_controller(Control).value == 0.3


@pytest.fixture
def _registries_as_before():
    before = [(registry, dict(registry.items())) for registry in (ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY)]
    yield
    for registry, entries in before:
        for name in set(registry) - set(entries):
            del registry._entries[name]


@pytest.mark.usefixtures("_registries_as_before")
def test_an_estimator_written_for_verl_runs():
    @register_adv_est("theirs")
    def theirs(token_level_rewards, response_mask, index, config=None, **kwargs):
        scale = config.get("scale", 1.0) * config.gamma
        return token_level_rewards * scale, index

    assert theirs.min_group_size == 1
    columns = {"token_level_rewards": REWARDS, "response_mask": MASK, "uid": INDEX}
    fn = core_algos.get_adv_estimator_fn("theirs")
    found, index = fn(**bind_arguments(fn, columns, {"gamma": 0.5}))
    assert torch.equal(found, REWARDS / 2)
    assert index is INDEX


@pytest.mark.usefixtures("_registries_as_before")
def test_a_loss_written_for_verl_runs_and_is_normalised_over_the_mini_batch():
    @register_policy_loss("theirs")
    def theirs(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights=None):
        losses = -advantages * torch.exp(log_prob - old_log_prob).clamp(max=1 + config.clip_ratio)
        share = config.policy_loss.share
        loss = core_algos.agg_loss(
            loss_mat=losses * share,
            loss_mask=response_mask,
            loss_agg_mode=loss_agg_mode,
            **config.global_batch_info,
        )
        return loss, {"actor/share": share}

    fn = core_algos.get_policy_loss_fn("theirs")
    settings = {"clip_ratio": 0.2, "policy_loss": {"share": 0.5}}

    def run(rows):
        columns = {
            "old_log_prob": torch.zeros(4, 2)[rows],
            "log_prob": torch.zeros(4, 2)[rows],
            "advantages": REWARDS[rows],
            "response_mask": MASK[rows],
            "loss_agg_mode": LossAggregation.from_mask("token-mean", MASK),
        }
        return fn(**bind_arguments(fn, columns, settings))[0]

    assert run(slice(0, 4)) == run(slice(0, 1)) + run(slice(1, 4)) == pytest.approx(-0.5 * 3.5 / 7)
