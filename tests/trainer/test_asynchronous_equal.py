"""trainer.async.max_staleness=0 is synchronous training, to the last bit."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.trainer.conftest import run_settings
from verl.trainer.base import StepReport
from verl.trainer.ppo_trainer import PPOTrainer

STEPS = 4
SEPARATE = ["trainer.n_gpus_per_node=2", "placement.actor_devices=[0]", "placement.rollout_devices=[1]"]
SETTINGS = ["algorithm.name=grpo", "actor_rollout_ref.actor.checkpoint.save_contents=[hf_model]"]
SETTINGS += [f"trainer.total_training_steps={STEPS}", f"trainer.save_freq={STEPS}"]
#: metrics that do not depend on time
KINDS = ("actor/", "critic/", "prompt_length/", "response_length/", "reward/", "rollout/logprob_gap")
REQUIRED = {"critic/score/mean", "critic/rewards/mean", "actor/pg_loss", "actor/grad_norm", "actor/ppo_kl"}


def train(tiny: Path, folder: Path, *more: str) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """The metrics of every step, and the weights of the last checkpoint."""
    trainer, found = PPOTrainer(overrides=[*run_settings(tiny, folder), *SETTINGS, *more]), []

    def record(report: StepReport) -> None:
        found.append({name: value for name, value in report.metrics.items() if name.startswith(KINDS)})

    trainer.on_step.append(record)
    trainer.fit()
    return found, load_file(folder / f"global_step_{STEPS}/actor/huggingface/model.safetensors")


def differing(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    """Names of the parameters that are not equal to the last bit."""
    assert a.keys() == b.keys()
    return [name for name in a if not torch.equal(a[name], b[name])]


@pytest.mark.parametrize("placement", ["one process", pytest.param("separate rollout", marks=pytest.mark.slow)])
def test_max_staleness_0_gives_the_weights_and_metrics_of_synchronous_training(placement, tiny, tmp_path):
    devices = SEPARATE if placement == "separate rollout" else []
    expected, weights = train(tiny, tmp_path / "synchronous", *devices)
    found, same = train(tiny, tmp_path / "zero", *devices, "trainer.async.max_staleness=0")
    assert len(expected) == STEPS and expected[0].keys() >= REQUIRED
    assert found == expected
    assert differing(same, weights) == []
    start = load_file(tiny / "model" / "model.safetensors")
    assert differing(start, weights) == list(start), "training changes every parameter"
    if devices:  # the comparison finds a run whose samples are one update old
        found, other = train(tiny, tmp_path / "one", *devices, "trainer.async.max_staleness=1")
        assert found[1:] != expected[1:] and differing(other, weights) == list(weights)
