"""verl/recipe/drgrpo: the settings are those of the preset, and what they remove is gone."""

from pathlib import Path

import pytest
import torch

from verl.algorithms.advantages import get_adv_estimator_fn
from verl.algorithms.masked import LossAggregation, agg_loss
from verl.config import load_config, to_flat_dict
from verl.config.presets import PRESETS

FILE = Path(__file__).parents[2] / "verl" / "recipe" / "drgrpo" / "drgrpo.yaml"


def test_the_file_and_the_preset_agree():
    config = to_flat_dict(load_config(FILE))
    published = {key: value for key, value in PRESETS["drgrpo"].items() if config[key] is not None}  # null: published
    assert {key: config[key] for key in published} == published
    assert config["actor_rollout_ref.actor.loss_scale_factor"] == 3000


def test_neither_the_spread_of_a_group_nor_the_length_of_a_response_weighs():
    config = load_config(FILE, ["data.max_response_length=4"])
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]] * 2)
    # two prompts: rewards 1 and 0, and rewards 0.1 and 0; each has a long and a short answer
    rewards = torch.zeros(4, 4)
    rewards[0, 3], rewards[2, 3] = 1.0, 0.1
    advantages, _ = get_adv_estimator_fn("grpo")(
        token_level_rewards=rewards, response_mask=mask, uid=["a", "a", "b", "b"], norm_adv_by_std_in_grpo=False
    )
    assert advantages[:, 0].tolist() == pytest.approx([0.5, -0.5, 0.05, -0.05])
    actor = config.actor_rollout_ref.actor
    agg = LossAggregation(actor.loss_agg_mode, 10, 4, scale_factor=actor.loss_scale_factor)
    weights = torch.ones(4, 4, requires_grad=True)
    agg_loss(weights, mask, agg).backward()
    assert torch.equal(weights.grad, mask / (4 * 4))  # every token alike: 1 / (answers * constant)
