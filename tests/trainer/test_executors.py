"""One run by every executor: the same rewards, log-probs and weights, whoever executes it and however it is divided.

float32 and 1e-5 where sums are taken in another order; to the last bit where the order is the same.
"""

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from verl.trainer.base import StepReport
from verl.trainer.local_trainer import LocalPPOTrainer

STEPS = 3
COLUMNS = ("responses", "token_level_scores", "token_level_rewards", "rollout_log_probs", "old_log_probs")
COLUMNS += ("ref_log_prob", "values", "advantages")
METRICS = ("actor/pg_loss", "actor/grad_norm", "actor/ppo_kl", "actor/kl_loss", "critic/vf_loss", "critic/grad_norm")
ACTOR = "actor_rollout_ref.actor"
ALGORITHMS = {
    "grpo": ["algorithm.name=grpo", f"{ACTOR}.use_kl_loss=true"],
    "ppo": ["algorithm.name=ppo", "algorithm.use_kl_in_reward=true"],
    "dapo": ["algorithm.name=dapo", "actor_rollout_ref.rollout.n=2", f"{ACTOR}.shuffle=true", f"{ACTOR}.ppo_epochs=2"],
}
#: Adam divides by the size of a gradient: with its own eps a rounding error becomes a whole step where that is 0
SMOOTH = [f"{name}.optim.override_optimizer_config.eps=1e-3" for name in (ACTOR, "critic")]
SAVED = ["trainer.save_freq=3", *(f"{name}.checkpoint.save_contents=[hf_model]" for name in (ACTOR, "critic"))]
BY_TOKENS = [f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.ppo_max_token_len_per_gpu=24"]
SEQUENCE, TENSOR = f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size", f"{ACTOR}.fsdp_config.tensor_parallel_size"
REF_SEQUENCE = "actor_rollout_ref.ref.fsdp_config.ulysses_sequence_parallel_size"
CRITIC_SEQUENCE, CRITIC_TENSOR = "critic.fsdp.ulysses_sequence_parallel_size=2", "critic.fsdp.tensor_parallel_size=2"
TWO, FOUR = (["trainer.n_gpus_per_node=2"], ["trainer.n_gpus_per_node=4"])
RAY = ["trainer.backend=ray", "trainer.device=cpu", "ray_kwargs.ray_init.num_cpus=2"]
LOCAL = ["placement.local_roles=[critic,ref]"]
RAY += ["ray_kwargs.ray_init.address=local"]  # and no cluster that is running here
TWO_POOLS = [*FOUR, "placement.actor_devices=[0,1]", "placement.critic_devices=[2,3]"]
THREE_POOLS = [*FOUR, "placement.actor_devices=[0,1]", "placement.critic_devices=[2]", "placement.ref_devices=[3]"]
EXECUTORS = {
    "one": [],
    "two": TWO,
    "two by tokens": [*TWO, *BY_TOKENS],
    "two share sequences": [*TWO, f"{SEQUENCE}=2"],
    "two share layers": [*TWO, f"{TENSOR}=2"],
    "four": FOUR,
    "four by tokens": [*FOUR, *BY_TOKENS],
    # the roles share rows in different ways
    "four share sequences": [*FOUR, f"{SEQUENCE}=2", f"{REF_SEQUENCE}=4", CRITIC_SEQUENCE],
    "four share both": [*FOUR, f"{TENSOR}=2", f"{REF_SEQUENCE}=2", CRITIC_SEQUENCE, CRITIC_TENSOR],
    "two pools": TWO_POOLS,
    "three pools": [*THREE_POOLS, "trainer.overlap=true"],
    "two and local roles": [*TWO, *LOCAL],
    "ray and local roles": [*RAY, *LOCAL],
    "ray, two": [*TWO, *RAY],
    "ray, two by tokens": [*TWO, *RAY, *BY_TOKENS],
    "ray, two pools": [*RAY, *TWO_POOLS, "trainer.overlap=true"],
}
#: not in `make test`
SLOW = {
    "grpo": ["two", "two share sequences", "two share layers", "four", "four by tokens"],
    "ppo": [
        "two by tokens",
        "four",
        "four share sequences",
        "four share both",
        "two pools",
        "three pools",
        "two and local roles",
    ],
    "dapo": ["two", "two by tokens", "two share sequences", "four"],
}


class Run(NamedTuple):
    """columns and metrics of each step; role -> weights after the last one."""

    columns: list[dict[str, torch.Tensor]]
    metrics: list[dict[str, float]]
    weights: dict[str, dict[str, torch.Tensor]]


def execute(overrides: list[str], folder: Path, trainer_class: type) -> Run:
    chosen = [*overrides, *SMOOTH, *SAVED, f"trainer.total_training_steps={STEPS}"]
    trainer, found = trainer_class(overrides=chosen), Run([], [], {})

    def record(report: StepReport) -> None:
        tensors = report.batch.tensors
        found.columns.append({name: tensors[name].clone() for name in COLUMNS if name in tensors})
        found.metrics.append({name: report.metrics[name] for name in METRICS if name in report.metrics})

    trainer.on_step.append(record)
    trainer.fit()
    for path in sorted(folder.glob(f"global_step_{STEPS}/*/huggingface/model.safetensors")):
        found.weights[path.parent.parent.name] = load_file(path)
    return found


@pytest.fixture(scope="module")
def run_of(tiny, tmp_path_factory):
    """(algorithm, executor) -> its Run, made once."""
    from tests.trainer.conftest import run_settings

    made: dict[tuple[str, str], Run] = {}

    def run(algorithm: str, executor: str) -> Run:
        if (algorithm, executor) not in made:
            trainer_class = LocalPPOTrainer
            if executor.startswith("ray"):
                pytest.importorskip("ray")
                from verl.trainer.ray_trainer import RayPPOTrainer as trainer_class
            folder = tmp_path_factory.mktemp("run")
            overrides = [*run_settings(tiny, folder), *ALGORITHMS[algorithm], *EXECUTORS[executor]]
            made[algorithm, executor] = execute(overrides, folder, trainer_class)
        return made[algorithm, executor]

    return run


def compare(found: Run, expected: Run, tolerance: float) -> None:
    """tolerance: absolute and relative, of every column and weight; 0: to the last bit."""
    assert len(found.columns) == len(expected.columns) == STEPS
    named = [(f"step {i}", a, b) for i, (a, b) in enumerate(zip(found.columns, expected.columns), start=1)]
    named += [(role, found.weights[role], weights) for role, weights in expected.weights.items()]
    assert "actor" in expected.weights
    for where, tensors, others in named:
        assert tensors.keys() == others.keys(), where
        for name, other in others.items():
            torch.testing.assert_close(tensors[name], other, rtol=tolerance, atol=tolerance, msg=f"{where}: {name}")
    for a, b in zip(found.metrics, expected.metrics, strict=True):
        assert a == pytest.approx(b, rel=1e-4, abs=max(tolerance, 1e-12))


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("algorithm", "executor"),
    [
        ("ppo", "ray, two by tokens"),
        *(pytest.param(algorithm, name, marks=slow) for algorithm, names in SLOW.items() for name in names),
    ],
)
def test_processes_give_the_numbers_of_one(algorithm, executor, run_of):
    compare(run_of(algorithm, executor), run_of(algorithm, "one"), 1e-5)


@pytest.mark.parametrize(
    ("algorithm", "executor", "same_order"),
    [
        pytest.param("ppo", "ray, two by tokens", "two by tokens", marks=slow),
        pytest.param("ppo", "ray and local roles", "one", marks=slow),
        pytest.param("ppo", "two pools", "two", marks=slow),
        pytest.param("ppo", "ray, two pools", "two", marks=slow),
        pytest.param("grpo", "ray, two", "two", marks=slow),
        pytest.param("dapo", "ray, two", "two", marks=slow),
    ],
)
def test_the_same_order_of_sums_gives_the_same_bits(algorithm, executor, same_order, run_of):
    compare(run_of(algorithm, executor), run_of(algorithm, same_order), 0)


@pytest.mark.parametrize(
    "algorithm", ["ppo", *(pytest.param(name, marks=slow) for name in ALGORITHMS if name != "ppo")]
)
def test_the_weights_that_are_compared_have_moved(algorithm, run_of, tiny):
    before = load_file(tiny / "model" / "model.safetensors")
    after = run_of(algorithm, "one").weights["actor"]
    assert all((after[name] - before[name]).abs().max() > 1e-4 for name in before)
