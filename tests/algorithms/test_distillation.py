"""Distillation losses against float64 loops, and the contract of policy losses: masks, padding, micro-batches."""

import math

import pytest
import torch

from tests.algorithms.merging import assert_micro_batches_add_up, assert_padding_is_never_read, merge_metrics
from verl.algorithms import LOSS_AGG_MODES, LossAggregation
from verl.algorithms.actor_loss import actor_loss
from verl.algorithms.distillation import distillation_loss
from verl.config.schema import ActorConfig, DistillationLossConfig

ESTIMATORS = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
ROWS, WIDTH, K = 6, 5, 3


def settings_of(**values) -> dict:
    return DistillationLossConfig(**values).model_dump()


def make_batch(seed=0):
    """Float64 columns and outputs with NaN where the mask is 0."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.arange(WIDTH) < torch.randint(1, WIDTH + 1, (ROWS, 1), generator=generator)

    def log_probs(*shape):
        values = -3 * torch.rand(*shape, generator=generator, dtype=torch.float64) - 0.05
        return torch.where(mask.view(ROWS, WIDTH, *[1] * (len(shape) - 2)), values, torch.nan)

    return {
        "log_probs": log_probs(ROWS, WIDTH),
        "old_log_prob": log_probs(ROWS, WIDTH),
        "candidate_log_probs": log_probs(ROWS, WIDTH, K),
        "teacher_log_probs": log_probs(ROWS, WIDTH),
        "teacher_candidate_log_probs": log_probs(ROWS, WIDTH, K) - 1,
        "response_mask": mask.long(),
    }


def call(batch, agg="token-mean", **values):
    """(loss, gradients of the sampled and of the candidate log-probs, metrics)."""
    outputs = {name: batch[name].clone().requires_grad_() for name in ("log_probs", "candidate_log_probs")}
    agg = agg if isinstance(agg, LossAggregation) else LossAggregation.from_mask(agg, batch["response_mask"])
    loss, metrics = distillation_loss(outputs, batch, batch["old_log_prob"], agg, settings_of(**values))
    loss.backward()
    return loss.detach(), outputs["log_probs"].grad, outputs["candidate_log_probs"].grad, metrics


def tokens_of(batch):
    return [(row, t) for row in range(ROWS) for t in range(WIDTH) if batch["response_mask"][row, t]]


# --------------------------------------------------------------- references: (value, d value / d log-prob) of one token


def token_estimate(kind, d):
    """d = log policy - log teacher."""
    if kind in ("kl", "k1"):
        return d, 1
    if kind == "abs":
        return abs(d), (d > 0) - (d < 0)
    if kind in ("mse", "k2"):
        return d * d / 2, d
    return math.exp(-d) - 1 + d, 1 - math.exp(-d)


@pytest.mark.parametrize("kind", ESTIMATORS)
@pytest.mark.parametrize("seed", [0, 1])
def test_estimators_equal_the_loop(kind, seed):
    batch = make_batch(seed)
    tokens = tokens_of(batch)
    loss, gradient, _, metrics = call(batch, loss_mode=kind)
    values = {
        (row, t): token_estimate(kind, (batch["log_probs"] - batch["teacher_log_probs"])[row, t].item())
        for row, t in tokens
    }
    assert loss.item() == pytest.approx(sum(value for value, _ in values.values()) / len(tokens), rel=1e-12)
    for row, t in tokens:
        assert gradient[row, t].item() == pytest.approx(values[row, t][1] / len(tokens), rel=1e-12, abs=1e-15)
    mean_abs = sum(abs(value) for value, _ in values.values()) / len(tokens)
    assert merge_metrics([metrics])["distillation/abs_loss"] == pytest.approx(mean_abs)
    mean = sum((batch["log_probs"] - batch["teacher_log_probs"])[token].item() for token in tokens) / len(tokens)
    assert merge_metrics([metrics])["distillation/reverse_kl"] == pytest.approx(mean)


@pytest.mark.parametrize("floor", [None, -2.0])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_forward_kl_topk_equals_the_loop(seed, floor):
    batch = make_batch(seed)
    tokens = tokens_of(batch)
    loss, sampled, gradient, metrics = call(batch, loss_mode="forward_kl_topk", log_prob_min_clamp=floor)
    total, mass = 0.0, 0.0
    for row, t in tokens:
        q, p = (batch[name][row, t].tolist() for name in ("candidate_log_probs", "teacher_candidate_log_probs"))
        mass += sum(map(math.exp, p))
        clamped = [(max(x, floor or -math.inf), max(y, floor or -math.inf)) for x, y in zip(q, p)]
        value = sum(math.exp(y) * (y - x) for x, y in clamped)
        total += max(value, 0)
        for k in range(K):
            below = floor is not None and q[k] < floor
            expected = 0 if value < 0 or below else -math.exp(clamped[k][1]) / len(tokens)
            assert gradient[row, t, k].item() == pytest.approx(expected, rel=1e-12)
    assert loss.item() == pytest.approx(total / len(tokens), rel=1e-12)
    assert sampled is None  # only the candidates are in the loss
    assert merge_metrics([metrics])["distillation/teacher_mass"] == pytest.approx(mass / len(tokens))


def test_the_advantage_is_the_negative_clamped_loss():
    batch = make_batch(4)
    batch["old_log_prob"] = batch["log_probs"]  # a ratio of 1
    values = {"loss_mode": "k1", "use_policy_gradient": True, "loss_max_clamp": 0.5}
    _, gradient, _, metrics = call(batch, **values)
    tokens = tokens_of(batch)
    for row, t in tokens:
        d = (batch["log_probs"] - batch["teacher_log_probs"])[row, t].item()
        assert gradient[row, t].item() == pytest.approx(min(max(d, -0.5), 0.5) / len(tokens), rel=1e-12)
    assert "distillation/pg_clipfrac" in metrics and not any(name.startswith("actor/") for name in metrics)


def test_the_clip_range_is_that_of_the_section():
    batch = make_batch(5)
    batch["old_log_prob"] = batch["log_probs"] - math.log(1.3)  # a ratio of 1.3
    batch["teacher_log_probs"] = batch["log_probs"] + 1  # an advantage of 1
    for clip, value in ({"clip_ratio_high": 0.2}, 1.2), ({"clip_ratio_high": 0.4}, 1.3):
        loss, *_ = call(batch, loss_mode="k1", use_policy_gradient=True, **clip)
        assert loss.item() == pytest.approx(-value)


LOSSES = [{"loss_mode": mode} for mode in (*ESTIMATORS, "forward_kl_topk")]
LOSSES += [{**values, "use_policy_gradient": True} for values in LOSSES]


@pytest.mark.parametrize("values", LOSSES, ids=lambda values: "-".join(map(str, values.values())))
class TestContract:
    @pytest.mark.parametrize("mode", LOSS_AGG_MODES)
    @pytest.mark.parametrize("sizes", [[1] * 6, [2, 1, 3]])
    def test_micro_batches_add_up(self, values, mode, sizes):
        batch = make_batch(6)
        batch["response_mask"][2] = 0
        agg = LossAggregation.from_mask(mode, batch["response_mask"], scale_factor=7)
        assert_micro_batches_add_up(lambda columns: call(columns, agg, **values), batch, sizes)

    def test_padding_is_never_read(self, values):
        assert_padding_is_never_read(lambda columns: call(columns, **values), make_batch(7))

    def test_a_wider_batch_is_the_same(self, values):
        batch = make_batch(8)
        pad = {name: (0, 0) * (column.dim() - 2) + (0, 2) for name, column in batch.items()}
        wider = {name: torch.nn.functional.pad(column, pad[name]) for name, column in batch.items()}
        torch.testing.assert_close(call(batch, **values)[0], call(wider, **values)[0], rtol=1e-12, atol=0)

    def test_a_policy_equal_to_the_teacher_has_no_loss(self, values):
        batch = make_batch(9)
        batch["teacher_log_probs"] = batch["old_log_prob"] = batch["log_probs"]
        batch["teacher_candidate_log_probs"] = batch["candidate_log_probs"]
        loss, *_ = call(batch, **values)
        assert loss.item() == pytest.approx(0, abs=1e-12)

    def test_without_tokens_loss_is_zero(self, values):
        batch = make_batch(10)
        batch["response_mask"] = torch.zeros_like(batch["response_mask"])
        loss, *_ = call(batch, **values)
        assert loss == 0


@pytest.mark.parametrize("coefficient", [0.0, 0.3, 2.0])
@pytest.mark.parametrize("with_rewards", [True, False])
def test_the_actor_adds_it_to_the_policy_loss(coefficient, with_rewards):
    batch = make_batch(11)
    generator = torch.Generator().manual_seed(0)
    columns = {
        **batch,
        "advantages": torch.randn(ROWS, WIDTH, generator=generator).double(),
        "old_log_probs": batch["old_log_prob"],
    }
    outputs = {"log_probs": batch["log_probs"]}
    agg = LossAggregation.from_mask("token-mean", batch["response_mask"])
    section = settings_of(loss_mode="k2", distillation_loss_coef=coefficient, use_task_rewards=with_rewards)
    arguments = {"loss_mode": "vanilla", "settings": ActorConfig().loss_settings, "agg": agg}
    task, _ = actor_loss(outputs, columns, **arguments)
    both, metrics = actor_loss(outputs, columns, **arguments, distillation=section)
    alone, _ = distillation_loss(outputs, columns, batch["old_log_prob"], agg, section)
    assert both.item() == pytest.approx((task + coefficient * alone if with_rewards else alone).item())
    assert ("actor/pg_loss" in metrics) == with_rewards
    assert merge_metrics([metrics])["distillation/loss"] == pytest.approx(alone.item())
