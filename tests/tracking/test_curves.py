"""Learning curves: the numbers that are drawn, the picture that comes out, and what is refused."""

import json

import pytest
from matplotlib.image import imread

from verl.tracking.curves import centred_mean, moving_mean, read_metrics, robust_limits, save_curves


@pytest.fixture
def metrics(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rows = [{"step": s, "time": 0.0, "critic/score/mean": s / 30, "actor/entropy": 1 / s} for s in range(1, 31)]
    rows += [{"step": 15, "time": 0.0, "val-core/reverse/acc/mean@1": 0.4}]
    rows[3]["actor/entropy"] = None  # was not finite
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_numbers(metrics):
    found = read_metrics(metrics)
    assert found["val-core/reverse/acc/mean@1"] == [(15, 0.4)]
    assert [step for step, _ in found["actor/entropy"]] == [1, 2, 3, *range(5, 31)]
    assert moving_mean([1, 2, 3, 4], 2) == [1, 1.5, 2.5, 3.5]
    assert moving_mean([3.0], 10) == centred_mean([3.0], 10) == [3.0]
    assert centred_mean([1, 2, 6, 4], 3) == [1.5, 3, 4, 5]
    # it does not lag behind a straight line
    assert centred_mean(list(range(30)), 11)[5:-5] == list(range(5, 25))


def test_a_spike_does_not_stretch_the_axis():
    usual = [0.01 * (i % 10) for i in range(60)]
    low, high = robust_limits([*usual, 1.05])
    assert low <= 0 and 0.09 <= high < 0.12
    assert robust_limits(usual) is None  # no outliers
    assert robust_limits([*usual[:40], *[1.0] * 20]) is None  # a second level, not outliers
    assert robust_limits([0.0] * 50 + [1.0]) is None and robust_limits([1.0, 9.0]) is None


def test_picture(metrics, tmp_path):
    two = imread(save_curves(metrics, tmp_path / "out" / "curves.png"))
    one = imread(save_curves(metrics, tmp_path / "one.png", keys=["actor/entropy"]))
    assert two.shape[0] == one.shape[0] and two.shape[1] == pytest.approx(2 * one.shape[1], abs=2)
    assert two[..., :3].min() < 0.5 < two[..., :3].mean()  # lines on a light ground


def test_missing_metrics_are_errors(metrics, tmp_path):
    with pytest.raises(ValueError, match="has no 'actor/kl'; it has: actor/entropy, critic/score/mean, val-core"):
        save_curves(metrics, tmp_path / "x.png", keys=["actor/kl"])
    with pytest.raises(ValueError, match=r"other\.jsonl does not exist"):
        save_curves(metrics.with_name("other.jsonl"), tmp_path / "x.png")
    metrics.write_text('{"step": 1, "time": 0.0, "mine": 1.0}\n')
    with pytest.raises(ValueError, match="has nothing to plot"):
        save_curves(metrics, tmp_path / "x.png")
    assert not (tmp_path / "x.png").exists()
