"""Each algorithm learns the small task `reverse`, and learns nothing when its rewards are shuffled (slow).

In the recorded runs (benchmarks/results/learning.jsonl) 60 steps gain about 0.2.
"""

from pathlib import Path

import pytest

from benchmarks.learning import FURTHER, RECIPES, Curve, learn, method_of, overrides, start_model
from examples.quickstart.tasks import write_task
from verl.algorithms.presets import PRESETS
from verl.utils.curves import WINDOW

STEPS = 60
METHODS = sorted({*PRESETS, *RECIPES})


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Path, Path]:
    """The model after imitation, and prompts."""
    folder = tmp_path_factory.mktemp("learning")
    return start_model("reverse", folder), write_task("reverse", folder / "data", rows=64 * STEPS, seed=1)


def gain(name: str, made: tuple[Path, Path], out: Path, shuffled: bool) -> float:
    """Mean reward of the last ten steps less that of the first ten."""
    curve, method = Curve("reverse", name, 1, shuffled), method_of(name)
    settings = overrides("reverse", *made, out, STEPS, seed=1)
    shuffle = f"algorithm.shuffle_rewards={str(shuffled).lower()}"
    learn(method, curve, [*settings, shuffle, *method.settings])
    assert len(curve.reward) == STEPS
    return sum(curve.reward[-WINDOW:]) / WINDOW - sum(curve.reward[:WINDOW]) / WINDOW


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_it_learns(name, made, tmp_path):
    assert gain(name, made, tmp_path, shuffled=False) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_shuffled_rewards_teach_nothing(name, made, tmp_path):
    assert gain(name, made, tmp_path, shuffled=True) < 0.05


def test_what_a_method_needs_belongs_to_one():
    assert set(FURTHER) <= set(PRESETS)
