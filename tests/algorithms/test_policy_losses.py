"""Every registered policy loss against an independent float64 loop and a worked example, and the common contract.

A new loss needs an entry in TOKEN_LOSSES or ROW_LOSSES; the contract tests find it in the registry.
"""

import inspect
import math

import pytest
import torch

from tests.algorithms.merging import assert_micro_batches_add_up, assert_padding_is_never_read, merge_metrics
from verl.algorithms import (
    LOSS_AGG_MODES,
    POLICY_LOSS_REGISTRY,
    LossAggregation,
    bind_arguments,
    get_policy_loss_fn,
)
from verl.algorithms.policy_losses import FIXED_AGG_MODE, SELECTS_PER_MICRO_BATCH

SETTINGS = {"dro_beta": 0.3, "clip_cov_lb": 0.0, "clip_cov_ratio": 0.2, "kl_cov_ratio": 0.2, "sppo_eta": 0.7}
# losses that ignore loss_agg_mode
SEQUENCE_MEAN = set(FIXED_AGG_MODE)
WEIGHTED = sorted(
    name for name, fn in POLICY_LOSS_REGISTRY.items() if "rollout_is_weights" in inspect.signature(fn).parameters
)
# losses whose gradient does not depend on the micro-batch size
SPLITTABLE = sorted(set(POLICY_LOSS_REGISTRY) - set(SELECTS_PER_MICRO_BATCH))


def make_batch(seed=0, rows=6, width=5, spread=0.6):
    """Float64 columns with NaN where the mask is 0; the ratios reach far over every clip range."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.arange(width) < torch.randint(1, width + 1, (rows, 1), generator=generator)

    def column(draw):
        return torch.where(mask, draw(rows, width, generator=generator, dtype=torch.float64), torch.nan)

    old = -column(torch.rand) - 0.2
    return {
        "old_log_prob": old,
        "log_prob": (old + spread * column(torch.randn)).clamp(max=-0.01),
        "advantages": column(torch.randn),
        "response_mask": mask.long(),
        "rollout_log_probs": old + 0.3 * column(torch.randn),
    }


def call(name, batch, mode="token-mean", **settings):
    """(loss, gradient, metrics) of the loss on the columns."""
    fn = get_policy_loss_fn(name)
    log_prob = batch["log_prob"].clone().requires_grad_()
    columns = {**batch, "log_prob": log_prob, "loss_agg_mode": mode}
    settings = {**SETTINGS, "generator": torch.Generator().manual_seed(0), **settings}
    loss, metrics = fn(**bind_arguments(fn, columns, settings))
    loss.backward()
    return loss.detach(), log_prob.grad, metrics


# --------------------------------------------------------------------- references: (value, d value / d lp) of one token


def sign(x):
    return (x > 0) - (x < 0)


def token_vanilla(a, lp, old, c=3.0, eps=0.2):
    rho = math.exp(lp - old)
    if a >= 0:
        return (-a * rho, -a * rho) if rho <= 1 + eps else (-a * (1 + eps), 0)
    if rho > c:
        return -a * c, 0
    return (-a * rho, -a * rho) if rho >= 1 - eps else (-a * (1 - eps), 0)


def token_cispo(a, lp, old):
    weight = min(math.exp(lp - old), 1.2)
    return -weight * a * lp, -weight * a


def token_sapo(a, lp, old):
    tau, rho = (1.0 if a > 0 else 1.05), math.exp(lp - old)
    gate = 1 / (1 + math.exp(-tau * (rho - 1)))
    return -a * 4 / tau * gate, -a * 4 * gate * (1 - gate) * rho


def token_gpg(a, lp, old):
    return -a * lp, -a


def token_dro(a, lp, old):
    return -(a * lp - 0.15 * (lp - old) ** 2), -(a - 0.3 * (lp - old))


def token_dppo(a, lp, old, divergence, bound):
    moving_on = (lp - old) * a > 0
    if moving_on and divergence(math.exp(lp), math.exp(old)) > bound:
        return 0, 0
    weight = min(math.exp(lp - old), 20)
    return -a * weight * lp, -a * weight


def bernoulli_kl(p, q):
    return q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))


TOKEN_LOSSES = {
    "vanilla": token_vanilla,
    "bypass_mode": token_vanilla,
    "cispo": token_cispo,
    "sapo": token_sapo,
    "gpg": token_gpg,
    "reinforce": token_gpg,
    "dro": token_dro,
    "dppo_tv": lambda a, lp, old: token_dppo(a, lp, old, lambda p, q: abs(p - q), 0.2),
    "dppo_kl": lambda a, lp, old: token_dppo(a, lp, old, bernoulli_kl, 0.05),
}


def row_gspo(a, lp, old):
    s = math.exp(sum(x - y for x, y in zip(lp, old)) / len(lp))
    return [token_vanilla_of_ratio(adv, s) for adv in a]


def token_vanilla_of_ratio(a, rho):
    if (a > 0 and rho > 1 + 4e-4) or (a < 0 and rho < 1 - 3e-4):
        return -a * min(max(rho, 1 - 3e-4), 1 + 4e-4), 0
    return -a * rho, -a * rho


def row_geo_mean(a, lp, old):
    clipped, free = [], []
    for adv, x in zip(a, (x - y for x, y in zip(lp, old))):
        over = (adv > 0 and x > 0.4) or (adv < 0 and x < -0.4)
        clipped.append(0.4 * sign(x) if over else x)
        free.append(not over)
    value = -sum(a) / len(a) * math.exp(sum(clipped) / len(a))
    return [(value, value * on) for on in free]  # the mean over tokens divides the gradient by the length


def row_sppo(a, lp, old):
    error = sum(x - y for x, y in zip(lp, old)) - 0.7 * sum(a) / len(a)
    return [(error**2, 2 * error * len(a))] * len(a)


ROW_LOSSES = {"gspo": row_gspo, "geo_mean": row_geo_mean, "sppo": row_sppo}


def reference(name, batch, mode):
    """(loss, gradient) by loops, aggregated by a weight for each token."""
    mask = batch["response_mask"].bool()
    mode = "seq-mean-token-mean" if name in SEQUENCE_MEAN else mode
    loss, gradient = 0.0, torch.zeros(mask.shape, dtype=torch.float64)
    for i, row in enumerate(mask):
        own = row.nonzero().flatten().tolist()
        a, lp, old = (batch[key][i, own].tolist() for key in ("advantages", "log_prob", "old_log_prob"))
        if name in ROW_LOSSES:
            found = ROW_LOSSES[name](a, lp, old)
        elif name == "decoupled_ppo":
            rollout = batch["rollout_log_probs"][i, own].tolist()
            weights = [min(math.exp(y - z), 2.0) for y, z in zip(old, rollout)]
            found = [tuple(w * x for x in token_vanilla(*token)) for w, token in zip(weights, zip(a, lp, old))]
        else:
            found = [TOKEN_LOSSES[name](*token) for token in zip(a, lp, old)]
        share = {
            "token-mean": 1 / int(mask.sum()),
            "seq-mean-token-sum": 1 / len(mask),
            "seq-mean-token-mean": 1 / len(mask) / len(own),
            "seq-mean-token-sum-norm": 1 / len(mask) / mask.shape[1],
            "token-sum": 1.0,
        }[mode]
        for t, (value, slope) in zip(own, found):
            loss += value * share
            gradient[i, t] = slope * share
    return loss, gradient


def test_every_loss_has_a_reference():
    assert set(TOKEN_LOSSES) | set(ROW_LOSSES) | {"decoupled_ppo"} | set(SELECTS_PER_MICRO_BATCH) == set(
        POLICY_LOSS_REGISTRY
    )


@pytest.mark.parametrize("name", SPLITTABLE)
@pytest.mark.parametrize("seed, spread", [(0, 0.6), (1, 0.05), (2, 2.0)])
def test_equals_the_loop(name, seed, spread):
    batch = make_batch(seed, spread=spread)
    if name == "gspo":
        batch["log_prob"] = batch["old_log_prob"] + 1e-3 * (batch["log_prob"] - batch["old_log_prob"])
    for mode in LOSS_AGG_MODES:
        expected, expected_gradient = reference(name, batch, mode)
        loss, gradient, _ = call(name, batch, mode)
        torch.testing.assert_close(loss.item(), expected, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-9, atol=1e-12)


OLD, NEW = torch.full((2, 2), -1.0), torch.tensor([[-0.8, -1.0], [-1.5, -1.1]])
# name, settings, loss, gradient for advantages [[1, 1], [-1, -1]] and mode token-mean; worked by hand
WORKED = [
    ("vanilla", {"clip_ratio_high": 0.28}, -0.129141, [[-0.305351, -0.25], [0, 0.226209]]),
    ("gspo", {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2}, -0.152585, [[-0.276293] * 2, [0, 0]]),
    ("geo_mean", {"clip_ratio_low": 0.2, "clip_ratio_high": 0.15}, -0.108588, [[0, -0.269471], [0, 0.215177]]),
    ("cispo", {"clip_ratio_low": 0.2}, -0.05883, [[-0.3, -0.25], [0.2, 0.226209]]),
    # Bernoulli KL(p_old || p): .0136 for token (0, 0), .0536 for (1, 0), .0027 for (1, 1); bound .05
    ("dppo_kl", {}, 0.245450, [[-0.305351, -0.25], [0, 0.226209]]),
]


@pytest.mark.parametrize("name, settings, loss, gradient", WORKED)
def test_worked_examples(name, settings, loss, gradient):
    columns = {"old_log_prob": OLD, "log_prob": NEW, "advantages": torch.tensor([[1.0, 1], [-1, -1]])}
    found, found_gradient, _ = call(name, {**columns, "response_mask": torch.ones(2, 2)}, **settings)
    torch.testing.assert_close(found, torch.tensor(loss), rtol=0, atol=2e-6)
    torch.testing.assert_close(found_gradient, torch.tensor(gradient), rtol=0, atol=2e-6)


def covariances(batch):
    mask = batch["response_mask"].bool()
    a, lp = batch["advantages"][mask], batch["log_prob"][mask]
    return [(x - a.mean().item()) * (y - lp.mean().item()) for x, y in zip(a.tolist(), lp.tolist())]


def test_kl_cov_equals_the_loop():
    batch = make_batch(4)
    mask = batch["response_mask"].bool()
    tokens = list(zip(*(batch[key][mask].tolist() for key in ("advantages", "log_prob", "old_log_prob"))))
    cov = covariances(batch)
    penalized = sorted(range(len(cov)), key=lambda i: -cov[i])[: int(0.2 * len(cov))]
    total = sum(-a * math.exp(lp - old) for a, lp, old in tokens)
    total += sum(abs(tokens[i][1] - tokens[i][2]) for i in penalized)
    assert len(penalized) > 1
    loss, gradient, _ = call("kl_cov", batch)
    assert loss.item() == pytest.approx(total / len(tokens), rel=1e-12)
    slopes = [-a * math.exp(lp - old) + sign(lp - old) * (i in penalized) for i, (a, lp, old) in enumerate(tokens)]
    torch.testing.assert_close(gradient[mask], torch.tensor(slopes, dtype=torch.float64) / len(tokens))


def test_clip_cov_drops_only_candidates():
    batch = make_batch(4)
    mask = batch["response_mask"].bool()
    tokens = list(zip(*(batch[key][mask].tolist() for key in ("advantages", "log_prob", "old_log_prob"))))
    surrogate = [token_vanilla(*token, c=math.inf) for token in tokens]
    candidates = {i for i, (value, slope) in enumerate(surrogate) if -0.5 < covariances(batch)[i] < 5 and slope != 0}
    share, seen = int(0.2 * len(tokens)), set()
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        loss, gradient, _ = call("clip_cov", batch, clip_cov_lb=-0.5, generator=generator)
        chosen = {i for i, g in enumerate(gradient[mask].tolist()) if g == 0 and surrogate[i][1] != 0}
        assert len(chosen) == share < len(candidates)
        assert chosen <= candidates
        kept = sum(value for i, (value, _) in enumerate(surrogate) if i not in chosen)
        assert loss.item() == pytest.approx(kept / len(tokens), rel=1e-12)
        again, _, _ = call("clip_cov", batch, clip_cov_lb=-0.5, generator=torch.Generator().manual_seed(seed))
        assert again == loss
        seen |= chosen
    assert seen == candidates  # every candidate is selected at some seed


# ------------------------------------------------------------------------------------------------------- properties


@pytest.mark.parametrize("name", SPLITTABLE)
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("sizes", [[1] * 6, [2, 1, 3], [5, 1]])
def test_micro_batches_add_up(name, mode, sizes):
    batch = make_batch(6)
    batch["response_mask"][2] = 0  # a rejected response, alone in a micro-batch of one
    weights = {"rollout_is_weights": torch.rand(6, 5, generator=torch.Generator().manual_seed(0)).double()}
    aggregation = LossAggregation.from_mask(mode, batch["response_mask"], scale_factor=7)
    assert_micro_batches_add_up(lambda columns: call(name, columns, aggregation), batch | weights, sizes)


@pytest.mark.parametrize("name", POLICY_LOSS_REGISTRY)
class TestContract:
    def test_padding_is_never_read(self, name):
        batch = make_batch(7)
        weights = {"rollout_is_weights": torch.where(batch["response_mask"].bool(), 1.0, torch.nan)}
        assert_padding_is_never_read(lambda columns: call(name, columns), batch | weights)

    def test_on_policy_gradient_is_the_plain_one(self, name):
        if name == "sppo":
            pytest.skip("a squared error, not a policy gradient")
        batch = make_batch(9)
        batch["log_prob"] = batch["rollout_log_probs"] = batch["old_log_prob"]
        batch["advantages"] = batch["advantages"][:, :1].expand(-1, 5)  # one advantage per response
        _, gradient, _ = call(name, batch, "seq-mean-token-mean", clip_cov_lb=100, clip_cov_ub=101)
        mask = batch["response_mask"]
        expected = torch.where(mask.bool(), -batch["advantages"] / mask.sum(-1, keepdim=True) / len(mask), 0)
        torch.testing.assert_close(gradient, expected)

    def test_without_tokens_loss_and_gradient_are_zero(self, name):
        batch = make_batch(10)
        batch["response_mask"] = torch.zeros_like(batch["response_mask"])
        loss, gradient, metrics = call(name, batch)
        assert loss == 0
        assert (gradient == 0).all()
        assert all(math.isfinite(value) for value in merge_metrics([metrics]).values())

    def test_bfloat16_is_computed_in_float32(self, name):
        batch = {key: column.bfloat16() for key, column in make_batch(11).items()}
        loss, _, _ = call(name, {**batch, "response_mask": batch["response_mask"].long()})
        assert loss.dtype == torch.float32

    def test_extreme_ratios_stay_finite(self, name):
        batch = {key: column.float() for key, column in make_batch(12).items()}
        batch["response_mask"] = batch["response_mask"].long()
        batch["log_prob"] = batch["old_log_prob"] - 200
        batch["old_log_prob"], batch["log_prob"] = batch["log_prob"], batch["old_log_prob"]
        loss, gradient, _ = call(name, batch)
        assert torch.isfinite(loss)
        assert torch.isfinite(gradient).all()

    def test_a_column_of_the_wrong_width_is_an_error(self, name):
        batch = make_batch()
        batch["advantages"] = batch["advantages"][:, :1]
        with pytest.raises(ValueError, match=r"mask's shape \(6, 5\), found \(6, 1\)"):
            call(name, batch)

    def test_metrics_are_pairs_or_floats_without_gradient(self, name):
        _, _, metrics = call(name, make_batch())
        assert metrics
        for value in metrics.values():
            for part in value if isinstance(value, tuple) else (value,):
                assert isinstance(part, float) or not part.requires_grad


@pytest.mark.parametrize("name", WEIGHTED)
def test_importance_weights_multiply_each_tokens_loss(name):
    batch = make_batch(13)
    mode = "seq-mean-token-mean" if name in SEQUENCE_MEAN else "token-mean"
    plain, plain_gradient, _ = call(name, batch, mode)
    ones = torch.ones(6, 5, dtype=torch.float64)
    for factor in (2.0, 0.0):
        loss, gradient, _ = call(name, {**batch, "rollout_is_weights": factor * ones}, mode)
        torch.testing.assert_close(loss, factor * plain)
        torch.testing.assert_close(gradient, factor * plain_gradient)
    # the losses of single tokens sum to that of the batch
    total = torch.zeros_like(plain)
    for i in range(6):
        for t in range(5):
            only = torch.zeros_like(ones)
            only[i, t] = 1
            total += call(name, {**batch, "rollout_is_weights": only}, mode)[0]
    torch.testing.assert_close(total, plain)


def test_weights_are_constants():
    batch = make_batch(13)
    weights = torch.ones(6, 5, dtype=torch.float64, requires_grad=True)
    call("vanilla", {**batch, "rollout_is_weights": weights})
    assert weights.grad is None


def test_clip_ratio_is_both_bounds_unless_one_is_given():
    batch = make_batch(14)
    both = call("vanilla", batch, clip_ratio=0.1)[0]
    assert both == call("vanilla", batch, clip_ratio_low=0.1, clip_ratio_high=0.1)[0]
    assert both != call("vanilla", batch, clip_ratio=0.1, clip_ratio_high=0.5)[0]
    assert both == call("vanilla", batch, clip_ratio=0.1, clip_ratio_low=None, clip_ratio_high=None)[0]


def test_dual_clip_needs_a_bound_above_one():
    with pytest.raises(ValueError, match="clip_ratio_c: expected a number above 1"):
        call("vanilla", make_batch(), clip_ratio_c=1.0)


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
def test_divergence_ppo_has_a_bound_for_each_direction_and_a_largest_weight(name):
    def gradient(advantage, old, new, **settings):
        columns = {"old_log_prob": [[old]], "log_prob": [[new]], "advantages": [[advantage]]}
        columns = {key: torch.tensor(value, dtype=torch.float64) for key, value in columns.items()}
        return call(name, {**columns, "response_mask": torch.ones(1, 1)}, **settings)[1].item()

    up, down = (math.log(0.3), math.log(0.45)), (math.log(0.45), math.log(0.3))  # TV .15, KL .054 and .048
    wide, narrow = 0.2, 0.02
    assert gradient(1.0, *up, clip_ratio_low=wide, clip_ratio_high=narrow) == 0
    assert gradient(1.0, *up, clip_ratio_low=narrow, clip_ratio_high=wide) == pytest.approx(-1.5)
    assert gradient(-1.0, *down, clip_ratio_low=narrow, clip_ratio_high=wide) == 0
    assert gradient(-1.0, *down, clip_ratio_low=wide, clip_ratio_high=narrow) == pytest.approx(2 / 3)
    # On the way back to the old policy nothing is dropped, but no weight is above c.
    assert gradient(-1.0, -5.0, -0.5) == pytest.approx(20)
    assert gradient(-1.0, -5.0, -0.5, clip_ratio_c=7.0) == pytest.approx(7)


def test_covariance_losses_select_at_least_one_token():
    batch = make_batch(4)
    _, _, metrics = call("kl_cov", batch, kl_cov_ratio=1e-9)
    assert metrics["actor/kl_cov_fraction"][0] == 1
    _, _, metrics = call("clip_cov", batch, clip_cov_ratio=1e-9, clip_cov_lb=-0.5)
    assert metrics["actor/pg_clipfrac"][0] == 1


def test_dro_needs_its_beta():
    with pytest.raises(ValueError, match="'dro_beta', but the setting is null"):
        call("dro", make_batch(), dro_beta=None)


class TestBypassMode:
    """`old_log_prob` is the log-prob of the rollout engine."""

    def test_the_clipped_ratio_is_not_weighted_twice(self):
        batch = make_batch(15)
        assert call("bypass_mode", batch, rollout_is="token")[0] == call("vanilla", batch)[0]

    def test_reinforce_is_weighted_by_the_current_ratio(self):
        batch = make_batch(15)
        found, gradient, metrics = call("bypass_mode", batch, loss_type="reinforce", rollout_is="sequence")
        log_ratio = (batch["log_prob"] - batch["old_log_prob"]).nansum(-1, keepdim=True)
        weights = log_ratio.exp().clamp(max=2).expand(6, 5)
        expected, expected_gradient, _ = call("reinforce", {**batch, "rollout_is_weights": weights})
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(gradient, expected_gradient)
        assert metrics["rollout_corr/rollout_is_max"] <= 2

    def test_rejection_removes_tokens_and_keeps_the_counts(self):
        batch = make_batch(15)
        _, plain, _ = call("bypass_mode", batch)
        _, gradient, metrics = call("bypass_mode", batch, rollout_rs="token_k1", rollout_rs_threshold="0.7_1.4")
        ratio = (batch["log_prob"] - batch["old_log_prob"]).exp()
        rejected = (ratio < 0.7) | (ratio > 1.4)
        assert rejected.any() and not rejected[batch["response_mask"].bool()].all()
        torch.testing.assert_close(gradient, torch.where(rejected, 0, plain))
        assert metrics["rollout_corr/rollout_rs_masked_fraction"] > 0

    def test_unsupported_settings_are_errors(self):
        with pytest.raises(ValueError, match="needs the weights of the whole batch"):
            call("bypass_mode", make_batch(), rollout_is_batch_normalize=True)
        with pytest.raises(ValueError, match="did you mean 'ppo_clip'"):
            call("bypass_mode", make_batch(), loss_type="ppo_clp")
