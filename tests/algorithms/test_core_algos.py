"""The functions of public verl's `core_algos`, and custom losses and estimators that were written for it."""

import inspect
import math
import re
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pytest
import torch

from tests.algorithms.merging import merge_metrics
from verl import DataProto
from verl.algorithms import (
    ADV_ESTIMATOR_REGISTRY,
    POLICY_LOSS_REGISTRY,
    LossAggregation,
    bind_arguments,
    core_algos,
    policy_losses,
    register_adv_est,
    register_policy_loss,
)
from verl.algorithms.actor_loss import actor_loss, custom_loss_config
from verl.algorithms.binding import Settings
from verl.algorithms.core_algos import AdvantageEstimator
from verl.config import schema

MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1]])
PUBLIC = ("vanilla", "gspo", "sapo", "gpg", "clip_cov", "kl_cov", "geo_mean", "cispo", "dro", "dppo_tv", "dppo_kl")
SETTINGS = {"dro_beta": 0.5, "clip_cov_ratio": 0.5, "clip_cov_lb": -9.0, "kl_cov_ratio": 0.5}


@dataclass
class Section:
    """The config of an actor as an object, as public verl has it."""

    clip_ratio: float | None = None
    clip_ratio_low: float | None = None
    clip_ratio_high: float | None = None
    clip_ratio_c: float = 3.0
    policy_loss: dict = field(default_factory=dict)
    global_batch_info: dict = field(default_factory=dict)


def columns(seed: int = 0) -> tuple[torch.Tensor, ...]:
    """old_log_prob, log_prob, advantages, response_mask."""
    generator = torch.Generator().manual_seed(seed)
    old, step, advantages = (torch.randn(3, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    return old - 2, old - 2 + 0.3 * step, advantages, MASK


def vanilla_loop(old, new, advantages, mask, low, high, bound) -> tuple[float, list[float]]:
    """The sum of the token losses, and the counts of clipped tokens, -log ratios and dual-clipped tokens."""
    total, shown = 0.0, [0.0, 0.0, 0.0]
    for i, t in mask.nonzero().tolist():
        a, x = advantages[i, t].item(), (new[i, t] - old[i, t]).item()
        rho = math.exp(x)
        free, cut = -a * rho, -a * min(max(rho, 1 - low), 1 + high)
        loss = max(free, cut)
        shown = [shown[0] + (cut > free), shown[1] - x, shown[2] + (a < 0 and loss > -a * bound)]
        total += min(loss, -a * bound) if a < 0 else loss
    return total, shown


# ---- core_algos -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PUBLIC)
def test_a_published_loss_is_the_registered_one(name):
    """clip_cov draws random tokens: the same seed draws the same ones."""
    config = Section(policy_loss=SETTINGS)
    torch.manual_seed(0)
    loss, metrics = vars(core_algos)[f"compute_policy_loss_{name}"](*columns(), config=config)
    own = POLICY_LOSS_REGISTRY[name]
    taken = {k: v for k, v in SETTINGS.items() if k in own.__kwdefaults__ or (k, name) == ("dro_beta", "dro")}
    torch.manual_seed(0)
    expected, expected_metrics = own(*columns(), own.__defaults__[0], **taken)
    assert loss == expected and metrics == merge_metrics([expected_metrics])
    assert all(isinstance(value, float) for value in metrics.values())


def test_vanilla_against_a_loop_with_the_counts_of_a_mini_batch():
    data = columns(1)
    total, shown = vanilla_loop(*data, 0.1, 0.25, 3.0)
    config = Section(0.2, 0.1, 0.25)
    loss, metrics = core_algos.compute_policy_loss_vanilla(*data, "token-mean", config)
    assert loss.item() == pytest.approx(total / 8, rel=1e-12)
    assert [metrics[k] for k in policy_losses.CLIP_METRICS] == pytest.approx([x / 8 for x in shown])

    counts = {"dp_size": 2, "batch_num_tokens": 20, "global_batch_size": 5, "loss_scale_factor": None}
    config = Section(0.2, 0.1, 0.25, global_batch_info=counts)
    assert core_algos.compute_policy_loss_vanilla(*data, "token-mean", config)[0].item() == pytest.approx(total / 10)
    rows = core_algos.compute_policy_loss_vanilla(*data, "seq-mean-token-sum", config)[0].item()
    assert rows == pytest.approx(total / 5 * 2)

    weights = torch.full((3, 4), 0.5)
    half, _ = core_algos.compute_policy_loss_vanilla(*data, "token-mean", {"clip_ratio": 0.2}, weights)
    whole, _ = core_algos.compute_policy_loss_vanilla(*data, "token-mean", {"clip_ratio": 0.2})
    assert half.item() == pytest.approx(whole.item() / 2)


def test_the_tuple_form_against_the_loop():
    data = columns(2)
    total, shown = vanilla_loop(*data, 0.3, 0.3, 1.5)
    loss, *means = core_algos.compute_policy_loss(*data, 0.3, clip_ratio_c=1.5, loss_agg_mode="seq-mean-token-sum")
    assert loss.item() == pytest.approx(total / 3, rel=1e-12)
    assert [mean.item() for mean in means] == pytest.approx([x / 8 for x in shown], rel=1e-12)


def test_gspo_takes_the_common_clip_ratio_and_the_mode():
    """As public verl: a bound that is not set is `clip_ratio`."""
    data = columns()
    gspo = core_algos.compute_policy_loss_gspo
    assert gspo(*data, config={"clip_ratio": 0.2})[0] == gspo(*data, config=Section(0.1, 0.2, 0.2))[0]
    assert gspo(*data)[0] == gspo(*data, "seq-mean-token-mean")[0] != gspo(*data, "token-mean")[0]
    ratios = ((data[1] - data[0]) * MASK).sum(-1) / MASK.sum(-1)
    expected = [max(-a * r, -a * min(max(r, 0.8), 1.2)) for i, r in enumerate(ratios.exp().tolist())
                for a in data[2][i][MASK[i].bool()].tolist()]  # fmt: skip
    assert gspo(*data, "token-mean", {"clip_ratio": 0.2})[0].item() == pytest.approx(sum(expected) / 8)


def test_bypass_mode_reads_the_rollout_correction():
    data = columns()
    reinforce = {"policy_loss": {"rollout_correction": {"loss_type": "reinforce"}}}
    loss, _ = core_algos.compute_policy_loss_bypass_mode(*data, config=reinforce)
    assert loss.item() == pytest.approx((-(data[1] * data[2]) * MASK).sum().item() / 8)
    clipped, _ = core_algos.compute_policy_loss_bypass_mode(*data, config={"clip_ratio": 0.2})
    assert clipped == core_algos.compute_policy_loss_vanilla(*data)[0]


def test_value_loss_with_the_counts_of_a_mini_batch():
    vpreds, returns, values = torch.tensor([[1.0, 2, 0]]), torch.tensor([[0.5, 1, 2]]), torch.tensor([[0.2, 1.9, 0.3]])
    call = partial(core_algos.compute_value_loss, vpreds, returns, values, torch.ones(1, 3), 0.5)
    # halves of the squared errors: 0.125, 0.5, 2; the clipped predictions 0.7, 2, 0 change nothing
    loss, clipfrac = call()
    assert loss.item() == pytest.approx(2.625 / 3) and clipfrac == 0
    assert call("token-mean", 4, 21)[0].item() == pytest.approx(2.625 / 21 * 4)
    assert call("seq-mean-token-sum", global_batch_size=5)[0].item() == pytest.approx(2.625 / 5)
    norm = call("seq-mean-token-sum-norm", global_batch_size=5, loss_scale_factor=10)
    assert norm[0].item() == pytest.approx(2.625 / 5 / 10)


def test_entropy_loss_of_uniform_logits():
    assert core_algos.compute_entropy_loss(torch.zeros(1, 2, 4), torch.ones(1, 2)).item() == pytest.approx(math.log(4))


def test_kl_penalty_forward_is_the_value_without_the_other_gradient():
    logprob = torch.tensor([[-1.0, -0.5]], requires_grad=True)
    found = core_algos.kl_penalty_forward(logprob, torch.tensor([[-1.5, -0.5]]), "k3+")
    assert found[0].tolist() == pytest.approx([math.exp(-0.5) - 1 + 0.5, 0.0], abs=1e-7)
    (gradient,) = torch.autograd.grad(found.sum(), logprob)
    assert gradient[0].tolist() == pytest.approx([1 - math.exp(-0.5), 0.0], abs=1e-7)  # that of k3, not of k2


@pytest.mark.parametrize(("method", "allowed"), [("pow", {0, 2, 3}), ("max_min", {0, 1}), ("max_random", {0, 1, 2, 3})])
def test_pf_ppo_draws_by_score(method, allowed):
    scores = torch.tensor([[2.0, 0], [0, 0], [1, 0], [0.5, 0]])
    rows = {"token_level_scores": scores.repeat_interleave(50, 0), "row": torch.arange(4).repeat_interleave(50)}
    torch.manual_seed(0)
    drawn = core_algos.compute_pf_ppo_reweight_data(DataProto.from_dict(rows), method)
    assert len(drawn) == 200 and set(drawn.batch["row"].tolist()) == allowed
    share = (drawn.batch["row"] == 0).double().mean().item()
    assert share == pytest.approx({"pow": 4 / 5.25, "max_min": 0.5, "max_random": 1 / 2.2}[method], abs=0.08)


def test_pf_ppo_refuses_an_unknown_method():
    batch = DataProto.from_dict({"token_level_scores": torch.zeros(2, 1)})
    with pytest.raises(ValueError, match="unknown reweight_method 'max': did you mean 'max_min'"):
        core_algos.compute_pf_ppo_reweight_data(batch, "max")


def test_estimators_by_member_of_the_enumeration():
    assert core_algos.get_adv_estimator_fn(AdvantageEstimator.GRPO) is core_algos.get_adv_estimator_fn("grpo")
    assert all(core_algos.get_adv_estimator_fn(each) for each in AdvantageEstimator)
    assert AdvantageEstimator.GAE == "gae" and f"{AdvantageEstimator.GAE}" == "gae"


REWARDS = torch.tensor([[0.0, 1], [0, 0], [0.5, 0], [0, 2]])
TWO = torch.tensor([[1, 1], [1, 1], [1, 0], [1, 1]])
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
        "response_mask": TWO,
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


def test_passk_reads_the_config():
    arguments = (REWARDS, TWO, INDEX)
    plain, _ = core_algos.compute_grpo_passk_outcome_advantage(*arguments, config={"norm_adv_by_std_in_grpo": False})
    assert torch.equal(plain, core_algos.compute_grpo_passk_outcome_advantage(*arguments, 1e-6, False)[0])
    assert not torch.equal(plain, core_algos.compute_grpo_passk_outcome_advantage(*arguments)[0])


def test_rewards_less_kl():
    found = core_algos.compute_rewards(REWARDS, torch.full((4, 2), -1.0), torch.full((4, 2), -1.5), 0.1)
    torch.testing.assert_close(found, REWARDS - 0.05)


def test_gdpo_takes_its_settings_from_the_config():
    found, _ = core_algos.compute_gdpo_outcome_advantage(
        REWARDS,
        TWO,
        INDEX,
        config={"gdpo_reward_keys": ["acc"], "gdpo_reward_weights": [2.0]},
        non_tensor_batch={"acc": np.array([1, 0, 0, 1], dtype=object)},
    )
    assert (found.sign()[:, 0] == torch.tensor([1, -1, -1, 1])).all()


def test_reinforce_and_controller():
    loss, _ = core_algos.compute_policy_loss_reinforce(TWO - 2.0, TWO - 2.0, REWARDS, TWO)
    assert loss == (1 + 0 + 0.5 + 2) / 4  # -A log_prob with log_prob -1, summed over tokens, mean over responses

    class Control:
        type, kl_coef = "fixed", 0.3

    assert core_algos.get_kl_controller(Control).value == 0.3


# ---- the actor's loss -----------------------------------------------------------------------------------------------


def loss_of(name: str, agg: LossAggregation | None = None, **settings) -> tuple[float, dict[str, float]]:
    old, new, advantages, mask = columns()
    batch = {"response_mask": mask, "old_log_probs": old, "advantages": advantages}
    agg = agg or LossAggregation.from_mask("token-mean", mask)
    settings = {"entropy_coeff": 0.0, "use_kl_loss": False, **settings}
    loss, metrics = actor_loss({"log_probs": new}, batch, loss_mode=name, settings=settings, agg=agg)
    return loss.item(), merge_metrics([metrics])


def test_a_loss_for_verl_finds_the_clip_ranges():
    """A user who sets nothing gets verl's defaults, and low and high follow clip_ratio."""
    seen = []

    def theirs(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean", config=None, **kwargs):
        seen.append([config.clip_ratio, config.clip_ratio_low, config.clip_ratio_high, config.get("clip_ratio_c", 3.0)])
        total, tokens = -(advantages * log_prob * response_mask).sum(), config.global_batch_info["batch_num_tokens"]
        mode, info = config.loss_agg_mode, config.global_batch_info
        assert core_algos.agg_loss(-advantages * log_prob, response_mask, mode, **info) == total / tokens
        return total / tokens, {}

    POLICY_LOSS_REGISTRY["theirs"] = theirs
    none = dict.fromkeys(("clip_ratio", "clip_ratio_low", "clip_ratio_high"))
    loss_of("theirs", **none)
    loss_of("theirs", **none | {"clip_ratio": 0.3, "clip_ratio_c": 5.0})
    loss_of("theirs", **none | {"clip_ratio_high": 0.28})
    assert seen == [[0.2, 0.2, 0.2, 3.0], [0.3, 0.3, 0.3, 5.0], [0.2, 0.2, 0.28, 3.0]]


def test_a_loss_for_older_releases_returns_four_tensors():
    POLICY_LOSS_REGISTRY["theirs"] = lambda old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config: (
        core_algos.compute_policy_loss(
            old_log_prob, log_prob, advantages, response_mask, config.clip_ratio, loss_agg_mode=loss_agg_mode
        )
    )
    assert loss_of("theirs") == loss_of("vanilla")


@pytest.mark.parametrize(("mode", "expected"), [(None, "seq-mean-token-mean"), ("token-mean", "token-mean")])
def test_gspo_honours_a_mode_that_was_set(mode, expected):
    found, _ = loss_of("gspo", loss_agg_mode=mode)
    assert found == POLICY_LOSS_REGISTRY["gspo"](*columns(), expected)[0].item()


def test_the_mode_of_vanilla_is_that_of_the_mini_batch():
    agg = LossAggregation("token-mean", 100, 50)
    assert loss_of("vanilla", agg, loss_agg_mode=None)[0] == pytest.approx(loss_of("vanilla")[0] * 8 / 100)


def test_an_estimator_written_for_verl_runs():
    @register_adv_est("theirs")
    def theirs(token_level_rewards, response_mask, index, config=None, **kwargs):
        scale = config.get("scale", 1.0) * config.gamma
        return token_level_rewards * scale, index

    assert theirs.min_group_size == 1
    columns = {"token_level_rewards": REWARDS, "response_mask": TWO, "uid": INDEX}
    fn = core_algos.get_adv_estimator_fn("theirs")
    found, index = fn(**bind_arguments(fn, columns, {"gamma": 0.5}))
    assert torch.equal(found, REWARDS / 2)
    assert index is INDEX


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
            "response_mask": TWO[rows],
            "loss_agg_mode": LossAggregation.from_mask("token-mean", TWO),
        }
        return fn(**bind_arguments(fn, columns, settings))[0]

    assert run(slice(0, 4)) == run(slice(0, 1)) + run(slice(1, 4)) == pytest.approx(-0.5 * 3.5 / 7)


# ---- registering and replacing --------------------------------------------------------------------------------------


def constant(old_log_prob, log_prob, advantages, response_mask, *args, **kwargs):
    return log_prob.sum() * 0 + 7, *torch.tensor([0.25, 0.5, 0.75])


@pytest.mark.parametrize("module", [core_algos, policy_losses])
def test_replacing_compute_policy_loss_changes_vanilla(module, monkeypatch):
    monkeypatch.setattr(policy_losses, "compute_policy_loss", policy_losses.compute_policy_loss)  # restored at the end
    monkeypatch.setattr(module, "compute_policy_loss", constant)
    loss, metrics = loss_of("vanilla")
    assert loss == 7 and [metrics[k] for k in policy_losses.CLIP_METRICS] == [0.25, 0.5, 0.75]


def test_replacing_another_published_function_is_refused():
    with pytest.raises(AttributeError, match=r"training does not call core_algos\.agg_loss.*register_policy_loss"):
        core_algos.agg_loss = None
    assert core_algos.agg_loss is not None


def test_the_registry_is_used_like_a_dict():
    POLICY_LOSS_REGISTRY["mine"] = constant
    POLICY_LOSS_REGISTRY["mine"] = other = lambda log_prob, loss_agg_mode: (log_prob.sum(), {})
    assert (
        POLICY_LOSS_REGISTRY["mine"] is other is core_algos.get_policy_loss_fn("mine")
        and POLICY_LOSS_REGISTRY.get("yours") is None
    )
    assert "mine" in list(POLICY_LOSS_REGISTRY.keys())
    del POLICY_LOSS_REGISTRY["mine"]
    with pytest.raises(ValueError, match="no policy loss is called 'mine'"):
        del POLICY_LOSS_REGISTRY["mine"]
    with pytest.raises(ValueError, match=r"'vanilla' is already registered .* replace it by item assignment"):
        core_algos.register_policy_loss("vanilla")(constant)
    POLICY_LOSS_REGISTRY.clear()
    assert len(POLICY_LOSS_REGISTRY) == 0


def test_the_section_policy_loss_of_the_config_of_a_custom_loss():
    section = {"loss_mode": "mine", "clip_cov_ratio": 0.5, "loss_kwargs": {"my_coef": 2.5}}
    actor = schema.ActorConfig(policy_loss=section)
    config = Settings(custom_loss_config(actor.loss_settings, LossAggregation("token-mean", 1, 1)))
    assert (config.policy_loss.my_coef, config.policy_loss.get("my_coef", 1.0), config.my_coef) == (2.5, 2.5, 2.5)
    assert (config.policy_loss.clip_cov_ratio, config.policy_loss.ppo_kl_coef) == (0.5, 0.1)
    given = schema.ActorConfig(policy_loss={"ppo_kl_coef": 1.0})
    again = custom_loss_config(given.loss_settings, LossAggregation("token-mean", 1, 1))
    assert again["policy_loss"]["ppo_kl_coef"] == 1.0
