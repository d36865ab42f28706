"""verl/recipe/drgrpo: the settings are those of the preset, and what they remove is gone."""

from pathlib import Path

from verl.config import load_config, to_flat_dict
from verl.config.presets import PRESETS

FILE = Path(__file__).parents[2] / "verl" / "recipe" / "drgrpo" / "drgrpo.yaml"


def test_the_file_and_the_preset_agree():
    config = to_flat_dict(load_config(FILE))
    published = {key: value for key, value in PRESETS["drgrpo"].items() if config[key] is not None}  # null: published
    assert {key: config[key] for key in published} == published
    assert config["actor_rollout_ref.actor.loss_scale_factor"] == 3000
