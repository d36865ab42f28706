"""The training engine of examples/custom_train_engine, selected by its name, trains as the built-in one does."""

from pathlib import Path

import pytest

from tests.trainer.conftest import make_tiny, run_settings
from verl.trainer.base import StepReport
from verl.trainer.local_trainer import LocalPPOTrainer

FILE = Path(__file__).parents[2] / "examples" / "custom_train_engine" / "data_parallel_engine.py"
CUSTOM = [f"imports=[{FILE}]", "actor_rollout_ref.actor.strategy=data_parallel"]
TWO = ["trainer.n_gpus_per_node=2"]
RAY = [*TWO, "trainer.backend=ray", "trainer.device=cpu", "ray_kwargs.ray_init.num_cpus=4"]
STEPS = ["trainer.total_training_steps=2", "actor_rollout_ref.actor.optim.lr=1e-5"]
METRICS = ("critic/score/mean", "actor/grad_norm", "actor/pg_loss", "actor/entropy", "actor/ppo_kl")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("tiny"))


def run(tiny: Path, folder: Path, overrides: list[str], trainer_class: type = LocalPPOTrainer) -> list[list[float]]:
    chosen = [*run_settings(tiny, folder), "algorithm.adv_estimator=grpo", *STEPS]
    trainer, found = trainer_class(overrides=[*chosen, *overrides]), []

    def record(report: StepReport) -> None:
        found.append([report.metrics[name] for name in METRICS])

    trainer.on_step.append(record)
    trainer.fit()
    return found


@pytest.fixture(scope="module")
def built_in(tiny, tmp_path_factory) -> list[list[float]]:
    return run(tiny, tmp_path_factory.mktemp("built_in"), [])


@pytest.mark.parametrize(
    "processes",
    [[], pytest.param(TWO, marks=pytest.mark.slow), pytest.param(RAY, marks=pytest.mark.slow)],
    ids=["one process", "two processes", "ray"],
)
def test_it_equals_the_built_in_engine(processes, built_in, tiny, tmp_path):
    trainer_class = LocalPPOTrainer
    if processes is RAY:
        pytest.importorskip("ray")
        from verl.trainer.ray_trainer import RayPPOTrainer as trainer_class

    found = run(tiny, tmp_path / "run", [*CUSTOM, *processes], trainer_class)
    assert len(found) == 2
    for step, expected in zip(found, built_in, strict=True):
        assert step == pytest.approx(expected, rel=1e-3, abs=1e-6)
