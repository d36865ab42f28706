"""Rollout correction in the flow: weights and mask by hand, advantages from before rejection, bypass, and refusals."""

import math

import pytest
import torch

from tests.trainer.runs import fit
from verl.config import load_config
from verl.dataflow import DataFlow, Operator
from verl.protocol import DataProto
from verl.trainer.base import StepReport
from verl.trainer.ppo.operators import advantage
from verl.trainer.ppo.rollout_correction import check_correction, correct_rollout

CORRECTION, LOSS = "algorithm.rollout_correction.", "actor_rollout_ref.actor.policy_loss.loss_mode"


def batch_by_hand() -> DataProto:
    """Two answers to one prompt: ratios pi_train / pi_rollout of 1.5, 3, 1 and of 0.5, 0.8; the first is right."""
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    ratios = torch.tensor([[1.5, 3.0, 1.0], [0.5, 0.8, 1.0]])
    sampled = torch.full((2, 3), -2.0)
    rewards = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    columns = {"response_mask": mask, "rollout_log_probs": sampled, "old_log_probs": sampled + ratios.log()}
    return DataProto(columns | {"responses": mask, "token_level_rewards": rewards}, {"uid": ["a", "a"]})


def corrected(*overrides: str) -> DataProto:
    config = load_config(overrides=["algorithm.adv_estimator=grpo", *overrides])
    flow = DataFlow(
        [
            Operator(
                "old_log_prob", lambda batch: {"old_log_probs": batch.batch["old_log_probs"]}, (), "old_log_probs"
            ),
            Operator("adv", advantage(config.algorithm), ("uid",), ("advantages", "returns")),
        ]
    )
    return correct_rollout(flow, config).compile(inputs=batch_by_hand().columns).run(batch_by_hand())


def test_weights_and_mask_by_hand():
    batch = corrected(f"{CORRECTION}rollout_is=token", f"{CORRECTION}rollout_rs=token_k1,seq_max_k2",
                      f"{CORRECTION}rollout_rs_threshold='0.6_2,1'")  # fmt: skip
    torch.testing.assert_close(
        batch.batch["rollout_is_weights"], torch.tensor([[1.5, 2.0, 1.0], [0.5, 0.8, 0.0]]), atol=1e-6, rtol=0
    )
    assert batch.batch["loss_mask"].tolist() == [[1, 0, 1], [0, 1, 0]]
    metrics = batch.meta_info["metrics"]
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx((1.5 + 2 + 1 + 0.5 + 0.8) / 5)
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(2 / 5)
    assert metrics["rollout_corr/kl"] == pytest.approx(-math.log(1.5 * 3 * 0.5 * 0.8) / 5)


@pytest.mark.parametrize("setting", ["rollout_is=token", "rollout_rs=token_k1", "bypass_mode=true"])
def test_log_probs_of_the_rollout_must_be_finite(setting, monkeypatch):
    batch = batch_by_hand()
    batch.batch["rollout_log_probs"][1, 2] = float("nan")  # padding may hold anything
    monkeypatch.setitem(globals(), "batch_by_hand", lambda: batch)
    threshold = [f"{CORRECTION}rollout_rs_threshold=2"]
    corrected(CORRECTION + setting, *threshold)
    batch.batch["rollout_log_probs"][1, 1] = float("nan")
    with pytest.raises(ValueError, match=r"rollout.log.probs: expected finite numbers, found NaN or infinity in 1"):
        corrected(CORRECTION + setting, *threshold)


@pytest.mark.filterwarnings("ignore:rollout correction rejected every token")
def test_advantages_are_those_from_before_rejection():
    plain = corrected()
    rejected = corrected(f"{CORRECTION}rollout_rs=seq_sum_k1", f"{CORRECTION}rollout_rs_threshold='0.5_2'")
    assert rejected.batch["loss_mask"].tolist() == [[0, 0, 0], [0, 0, 0]]  # 4.5 and 0.4
    assert torch.equal(rejected.batch["advantages"], plain.batch["advantages"])
    assert torch.equal(rejected.batch["response_mask"], batch_by_hand().batch["response_mask"])
    assert plain.batch["advantages"].abs().sum() > 0 and "loss_mask" not in plain


def after_steps(settings: list[str], steps: int = 1) -> tuple[torch.Tensor, list[StepReport]]:
    """All weights in one vector after a run, and its reports."""
    trainer, reports = fit([*settings, f"trainer.total_training_steps={steps}", "trainer.resume_mode=disable"])
    weights = trainer.roles["actor"].worker.engine.weights()
    return torch.cat([p.double().flatten() for _, p in weights]), reports


def test_without_a_mismatch_nothing_changes(settings):
    grpo = [*settings, "algorithm.adv_estimator=grpo"]
    plain, _ = after_steps(grpo)
    weighted, (report,) = after_steps([*grpo, f"{CORRECTION}rollout_is=token"])
    assert report.metrics["rollout_corr/rollout_is_mean"] == pytest.approx(1, abs=1e-4)
    # AdamW's first step is the sign of the gradient: where that is 0 but for rounding, a weight may go either way
    assert ((weighted - plain).abs() > 1e-5).double().mean() < 0.01
    bypassed, (report,) = after_steps([*grpo, f"{CORRECTION}bypass_mode=true"])
    assert ((bypassed - plain).abs() > 1e-5).double().mean() < 0.01
    assert "actor/entropy" not in report.metrics  # nothing was recomputed
    assert torch.equal(report.batch.batch["old_log_probs"], report.batch.batch["rollout_log_probs"])


def test_all_tokens_rejected_is_said_and_changes_no_weight(settings):
    chosen = [*settings, "algorithm.adv_estimator=gae", "actor_rollout_ref.actor.optim.weight_decay=0"]
    reject = [f"{CORRECTION}rollout_rs=token_k1", f"{CORRECTION}rollout_rs_threshold='5_6'"]
    before, _ = after_steps([*chosen, "trainer.critic_warmup=9"])
    with pytest.warns(UserWarning, match="rejected every token"):
        after, (report,) = after_steps([*chosen, *reject])
    assert torch.equal(before, after)
    assert report.metrics["rollout_corr/rollout_rs_masked_fraction"] == 1
    assert report.metrics["critic/advantages/max"] > 0  # of the answers, as they were sampled


def test_bypass_with_reinforce_runs(settings):
    chosen = [*settings, "algorithm.adv_estimator=grpo", f"{CORRECTION}bypass_mode=true"]
    chosen += [f"{CORRECTION}loss_type=reinforce", f"{CORRECTION}rollout_is=sequence"]
    _, reports = after_steps(
        [*chosen, f"{CORRECTION}rollout_rs=seq_mean_k3", f"{CORRECTION}rollout_rs_threshold=0.1"], 2
    )
    assert reports[1].metrics["actor/grad_norm"] > 0


@pytest.mark.parametrize(
    ("correction", "others", "message"),
    [
        ("rollout_rs=token_k1", [], "needs rollout_rs_threshold"),
        ("rollout_rs=token_k9 rollout_rs_threshold=2", [], "no rollout_rs is called 'token_k9'"),
        (
            "rollout_is=token rollout_is_threshold=0",
            [],
            r"correction\.rollout_is_threshold: .*: expected a number above 0",
        ),
        ("bypass_mode=true rollout_is=token", [], "already is the importance weight"),
        ("bypass_mode=true loss_type=reinforce rollout_is_batch_normalize=true", [], "no weights are computed for the"),
        ("rollout_is=token", [f"{LOSS}=decoupled_ppo"], "does not take rollout_is_weights"),
        ("bypass_mode=true", ["actor_rollout_ref.rollout.top_p=0.9"], "filtered by rollout.top_p=0.9, and"),
        ("", [f"{LOSS}=bypass_mode"], "but .* is bypass_mode"),
        ("bypass_mode=true loss_type=reinforce", [f"{LOSS}=vanilla"], "the loss bypass_mode"),
    ],
)
def test_what_does_not_fit_is_refused(correction, others, message):
    with pytest.raises(ValueError, match=message):
        check_correction(load_config(overrides=[*(CORRECTION + text for text in correction.split()), *others]))
