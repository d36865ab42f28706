"""One row per algorithm, whose names and settings exist."""

import inspect

import pytest

from verl.algorithms import ADV_ESTIMATOR_REGISTRY, LOSS_AGG_MODES, POLICY_LOSS_REGISTRY
from verl.config import load_config
from verl.config.presets import PRESETS

ACTOR = "actor_rollout_ref.actor."


@pytest.mark.parametrize("name", PRESETS)
class TestPreset:
    def test_is_a_valid_configuration(self, name):
        config = load_config(overrides=[f"algorithm.name={name}"])
        assert config.algorithm.adv_estimator == PRESETS[name]["algorithm.adv_estimator"]

    def test_names_what_is_registered(self, name):
        row = PRESETS[name]
        estimator = ADV_ESTIMATOR_REGISTRY[row["algorithm.adv_estimator"]]
        assert row["actor_rollout_ref.rollout.n"] >= estimator.min_group_size if estimator.min_group_size > 1 else True
        assert row[ACTOR + "policy_loss.loss_mode"] in POLICY_LOSS_REGISTRY
        assert row[ACTOR + "loss_agg_mode"] in LOSS_AGG_MODES

    def test_sets_the_clip_range_that_the_loss_was_published_with(self, name):
        row = PRESETS[name]
        parameters = inspect.signature(POLICY_LOSS_REGISTRY[row[ACTOR + "policy_loss.loss_mode"]]).parameters
        if name in ("dapo", "gpg"):
            pytest.skip("dapo is another range of vanilla; gpg has none")
        for setting in ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c"):
            if setting in parameters and parameters[setting].default is not None:
                assert row[ACTOR + setting] == parameters[setting].default


def test_every_loss_but_the_bare_ones_has_a_preset():
    used = {row[ACTOR + "policy_loss.loss_mode"] for row in PRESETS.values()}
    # dro needs a beta of the user's, and the others are modes of rollout correction or have a recipe.
    assert set(POLICY_LOSS_REGISTRY) - used == {"dro", "reinforce", "bypass_mode", "sppo"}


def test_every_estimator_but_synonyms_has_a_preset():
    used = {row["algorithm.adv_estimator"] for row in PRESETS.values()}
    assert set(ADV_ESTIMATOR_REGISTRY) - used == {"grpo_vectorized", "rloo_vectorized", "sppo"}


def test_presets_do_not_share_a_dictionary():
    assert len({id(row) for row in PRESETS.values()}) == len(PRESETS)
