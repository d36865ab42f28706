"""verl/recipe/sppo: settings only; the flow of the main trainer, two steps."""

from pathlib import Path

import pytest

from tests.trainer.runs import fit

FILE = Path(__file__).parents[2] / "verl" / "recipe" / "sppo" / "sppo.yaml"


def test_two_steps(settings):
    small = ["actor_rollout_ref.actor.ppo_mini_batch_size=4", "trainer.total_training_steps=2"]
    trainer, reports = fit([*settings, *small], config_path=FILE)
    # the only update of a step has the old log-probs itself
    assert [op.name for op in trainer.pipeline.operators][-4:] == ["reward", "adv", "update_actor", "sync_weights"]
    # one update a step, which sees a log-ratio of 0: the loss is the mean of (eta a)^2
    advantages = reports[0].batch.batch["advantages"][:, 0]
    assert reports[0].metrics["actor/pg_loss"] == pytest.approx((advantages**2).mean().item(), rel=1e-3)
    assert all(report.metrics["actor/grad_norm"] > 0 for report in reports)
