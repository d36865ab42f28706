"""Each algorithm learns the small task `reverse`, and learns nothing when its rewards are shuffled (slow).

Also the figures of the benchmark by hand, and its page.

In the recorded runs (benchmarks/results/learning.jsonl) 60 steps gain about 0.2.
"""

from pathlib import Path

import pytest

from benchmarks.learning import FURTHER, RECIPES, Curve, learn, method_of, overrides, start_model
from benchmarks.learning_page import table
from benchmarks.learning_pool import read_plan
from examples.quickstart.tasks import write_task
from verl.config.presets import PRESETS
from verl.tracking.curves import WINDOW

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


# With rewards of 0 and 1 the best of a group has a lead only where no other answer is right: in few groups here.
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*METHODS} - {"grpo_passk"}))
def test_it_learns(name, made, tmp_path):
    assert gain(name, made, tmp_path, shuffled=False) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_shuffled_rewards_teach_nothing(name, made, tmp_path):
    assert gain(name, made, tmp_path, shuffled=True) < 0.05


def test_what_a_method_needs_belongs_to_one():
    assert set(FURTHER) <= set(PRESETS)


def run_by_hand(seed: int, from_step: int, accuracy: float, **more) -> Curve:
    """30 steps of 100 responses: reward 0 before `from_step` (counted from 0), 1 from there on."""
    reward = [float(step >= from_step) for step in range(30)]
    responses = [100 * (step + 1) for step in range(30)]
    return Curve("sort", "grpo", seed, reward=reward, responses=responses, accuracy=[(30, accuracy)], **more)


def test_a_row_of_the_page():
    control = run_by_hand(1, 0, 0.25, shuffled=True)
    more = {"entropy": [1.0] * 20 + [0.5] * 10, "sampled": [(100, 0.25, 0.5), (200, 0.75, 0.875)]}
    curves = [run_by_hand(1, 12, 0.9, **more), run_by_hand(2, 5, 0.7, **more), control]
    *_, row = table(curves, "sort").splitlines()
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells == [
        "`grpo`",
        "1,450 (1,100 to 1,800)",
        "0.25 -> 1.00",
        "0.25",  # after 100 steps; 200 is not shown
        "0.50",
        "0.80 (0.70 to 0.90)",
        "0.50",
        "0.25",
        "2",
    ]


PLAN = """
reverse  grpo,ppo  1-2    # ppo takes longer
reverse  grpo      2,3    shuffled

sort     online_dpo  7    as=sharp dpo.beta=0.5 algorithm.filter_groups.enable=true
reverse  grpo  1
"""


def test_a_plan():
    found = read_plan(PLAN)
    assert [(job.name, job.seed, job.shuffled) for job in found[:6]] == [
        ("ppo", 1, False),
        ("ppo", 2, False),
        ("grpo", 1, False),
        ("grpo", 2, False),
        ("grpo", 2, True),
        ("grpo", 3, True),
    ]
    assert [job.curve.key for job in found[6:]] == [("sort", "sharp", 7, False)]  # the last line is there already
    assert (found[6].algorithm, found[6].settings) == (
        "online_dpo",
        ("dpo.beta=0.5", "algorithm.filter_groups.enable=true"),
    )


def test_a_plan_that_says_nothing_known():
    with pytest.raises(ValueError, match=r"line 2 of the plan: 'grop' is unknown.*did you mean 'grpo'"):
        read_plan("\nreverse grop 1")
    with pytest.raises(ValueError, match="line 1 of the plan: expected TASK ALGORITHMS SEEDS"):
        read_plan("reverse grpo")
