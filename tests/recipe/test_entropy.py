"""verl/recipe/entropy: its settings, its public name, and a step with either loss."""

import importlib

import pytest

from tests.trainer.runs import fit
from verl.recipe.entropy import EntropyTrainer

LOSS = "actor_rollout_ref.actor.policy_loss."


def test_the_settings_are_those_of_the_paper(settings):
    trainer = EntropyTrainer(overrides=settings)
    loss, groups = trainer.config.actor_rollout_ref.actor.policy_loss, trainer.config.algorithm.filter_groups
    assert (loss.loss_mode, loss.kl_cov_ratio, loss.ppo_kl_coef) == ("kl_cov", 0.002, 1.0)
    assert (loss.clip_cov_ratio, loss.clip_cov_lb, loss.clip_cov_ub) == (2e-4, 1.0, 5.0)
    assert groups.enable and groups.metric == "acc"


@pytest.mark.parametrize("loss", ["kl_cov", "clip_cov"])
def test_two_steps(settings, loss):
    own = [f"{LOSS}loss_mode={loss}", "algorithm.filter_groups.enable=false", "trainer.total_training_steps=2"]
    _, reports = fit([*settings, *own], EntropyTrainer)
    assert all(report.metrics["actor/grad_norm"] > 0 for report in reports)
    assert ("actor/kl_cov_fraction" in reports[0].metrics) == (loss == "kl_cov")


@pytest.mark.parametrize("name", ["entropy", "flowrl", "gkd", "safe_rlhf", "spin"])
def test_the_commands_have_their_public_names(name):
    module = importlib.import_module(f"recipe.{name}.main_{name}")
    assert module is importlib.import_module(f"verl.recipe.{name}.main_{name}")
