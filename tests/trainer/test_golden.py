"""Five steps of every algorithm on a tiny model, against recorded numbers: a refactor must reproduce them.

`python tests/trainer/test_golden.py` writes tests/golden/*.json anew; look at the difference before you commit it.
"""

import json
import sys
import tempfile
from pathlib import Path

import pytest

from tests.trainer.runs import weight_sum
from verl.trainer.base import StepReport
from verl.trainer.local_trainer import LocalPPOTrainer

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
ALGORITHMS = {
    "ppo": ["algorithm.name=ppo", "algorithm.use_kl_in_reward=true", "algorithm.lam=0.95"],
    "grpo": [
        "algorithm.name=grpo",
        *(f"actor_rollout_ref.actor.{kl}" for kl in ("use_kl_loss=true", "kl_loss_coef=0.1")),
    ],
    "drgrpo": ["algorithm.name=drgrpo"],
    "rloo": ["algorithm.name=rloo"],
    "remax": ["algorithm.name=remax"],
    "reinforce_plus_plus": ["algorithm.name=reinforce_plus_plus"],
    "reinforce_plus_plus_baseline": ["algorithm.name=reinforce_plus_plus_baseline"],
    "entropy_bonus": ["algorithm.name=grpo", "actor_rollout_ref.actor.entropy_coeff=0.01"],
}
RECORDED = ("critic/score/mean", "critic/advantages/max", "response_length/mean", "reward/greedy_mean")
RECORDED += tuple(f"actor/{name}" for name in ("entropy", "pg_loss", "ppo_kl", "kl_loss", "grad_norm"))
RECORDED += ("critic/vf_loss", "critic/grad_norm")


def five_steps(settings: list[str], algorithm: str) -> list[dict[str, float]]:
    """The recorded metrics of each step, and a sum that every weight counts in."""
    overrides = [*settings, *ALGORITHMS[algorithm], "trainer.total_training_steps=5", "trainer.resume_mode=disable"]
    trainer = LocalPPOTrainer(overrides=overrides)
    steps: list[dict[str, float]] = []

    def record(report: StepReport) -> None:
        steps.append({name: report.metrics[name] for name in RECORDED if name in report.metrics})
        steps[-1]["weights"] = weight_sum(trainer)

    trainer.on_step.append(record)
    trainer.fit()
    return steps


@pytest.mark.fast("grpo", "ppo", "remax", "reinforce_plus_plus")
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_five_steps_are_as_recorded(algorithm, settings):
    expected = json.loads((GOLDEN / f"{algorithm}.json").read_text())
    found = five_steps(settings, algorithm)
    assert len(found) == len(expected) == 5
    for step, (a, b) in enumerate(zip(found, expected), start=1):
        assert a == pytest.approx(b, rel=2e-3, abs=2e-5), f"step {step}"


def _write() -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from tests.trainer.conftest import make_tiny, run_settings

    GOLDEN.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        tiny = make_tiny(Path(folder))
        for algorithm in ALGORITHMS:
            steps = five_steps(run_settings(tiny, Path(folder) / algorithm), algorithm)
            (GOLDEN / f"{algorithm}.json").write_text(json.dumps(steps, indent=1) + "\n")
            print(algorithm, steps[-1])


if __name__ == "__main__":
    _write()
