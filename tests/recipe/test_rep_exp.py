"""verl/recipe/rep_exp: the bonus, what it changes, and where."""

import pytest
import torch

from tests.trainer.runs import fit
from verl.recipe.rep_exp import RepExpTrainer
from verl.recipe.rep_exp.main_rep_exp import leverage


def test_the_bonus_is_that_of_an_explicit_inverse():
    features = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [5.0, 4.0]])
    bonus = leverage(features, 0.01)
    centered = features - features.mean(0)
    inverse = torch.linalg.inv(0.01 * torch.eye(2) + centered.T @ centered)
    torch.testing.assert_close(bonus, torch.stack([h @ inverse @ h for h in centered]), rtol=1e-4, atol=1e-5)
    assert bonus[3] > 8 * bonus[0] and (bonus >= 0).all() and (bonus <= 1).all()
    assert leverage(features[:3], 0.01).abs().max() == 0  # equal responses are not novel


@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_rewards_differ_by_the_bonus_and_scores_do_not(settings, beta):
    trainer, (report,) = fit([*settings, f"rep_exp.beta={beta}", "trainer.total_training_steps=1"], RepExpTrainer)
    assert [op.name for op in trainer.pipeline.operators].index("explore") == (
        [op.name for op in trainer.pipeline.operators].index("reward") + 1
    )
    metrics = report.metrics
    gained = metrics["critic/rewards/mean"] - metrics["critic/score/mean"]
    assert gained == pytest.approx(beta * metrics["rep_exp/bonus_mean"], abs=1e-5)
    assert 0 < metrics["rep_exp/bonus_mean"] < 1
