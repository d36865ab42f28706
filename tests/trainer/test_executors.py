"""The same run by other executors: several processes, and roles in pools of their own, give the numbers of one."""

import pytest

from verl.trainer.base import StepReport
from verl.trainer.local_trainer import LocalPPOTrainer

STEPS = 3
COMPARED = ("critic/score/mean", "actor/entropy", "actor/pg_loss", "actor/grad_norm", "actor/ppo_kl", "critic/vf_loss")
ALGORITHMS = {
    "grpo": ["algorithm.name=grpo", "actor_rollout_ref.actor.use_kl_loss=true"],
    "ppo": ["algorithm.name=ppo", "algorithm.use_kl_in_reward=true"],
    "shuffled": ["algorithm.name=rloo", "actor_rollout_ref.actor.ppo_epochs=2", "actor_rollout_ref.actor.shuffle=true"],
}


def run(settings: list[str], *more: str, trainer_class: type = LocalPPOTrainer) -> list[dict[str, float]]:
    trainer = trainer_class(
        overrides=[*settings, *more, f"trainer.total_training_steps={STEPS}", "trainer.resume_mode=disable"]
    )
    steps: list[dict[str, float]] = []

    def record(report: StepReport) -> None:
        steps.append({name: report.metrics[name] for name in COMPARED if name in report.metrics})

    trainer.on_step.append(record)
    trainer.fit()
    return steps


def compare(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    assert len(found) == len(expected) == STEPS
    for step, (a, b) in enumerate(zip(found, expected), start=1):
        assert a == pytest.approx(b, rel=1e-3, abs=1e-5), f"step {step}"


@pytest.mark.parametrize(
    ("algorithm", "executor"),
    [
        ("grpo", ["trainer.n_gpus_per_node=2"]),
        pytest.param("grpo", ["trainer.n_gpus_per_node=4"], marks=pytest.mark.slow),
        ("ppo", ["trainer.n_gpus_per_node=2", "actor_rollout_ref.actor.use_dynamic_bsz=true",
                 "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24"]),
        pytest.param("shuffled", ["trainer.n_gpus_per_node=2"], marks=pytest.mark.slow),
        ("grpo", ["trainer.n_gpus_per_node=2", "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=2"]),
        ("grpo", ["trainer.n_gpus_per_node=2", "actor_rollout_ref.actor.fsdp_config.tensor_parallel_size=2"]),
        pytest.param(
            "ppo",
            ["trainer.n_gpus_per_node=4", "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=2",
             "actor_rollout_ref.ref.fsdp_config.ulysses_sequence_parallel_size=4",
             "critic.fsdp.ulysses_sequence_parallel_size=2"],
            marks=pytest.mark.slow,
        ),
        pytest.param(  # the roles share rows in different ways
            "ppo",
            ["trainer.n_gpus_per_node=4", "actor_rollout_ref.actor.fsdp_config.tensor_parallel_size=2",
             "actor_rollout_ref.ref.fsdp_config.ulysses_sequence_parallel_size=2",
             "critic.fsdp.ulysses_sequence_parallel_size=2", "critic.fsdp.tensor_parallel_size=2"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "ppo",
            ["trainer.n_gpus_per_node=4", "placement.actor_devices=[0,1]", "placement.critic_devices=[2,3]"],
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_processes_give_the_numbers_of_one(algorithm, executor, settings):
    chosen = [*settings, *ALGORITHMS[algorithm]]
    compare(run(chosen, *executor), run(chosen))


def test_ray_gives_the_numbers_of_one_process(settings):
    pytest.importorskip("ray")
    from verl.trainer.ray_trainer import RayPPOTrainer

    chosen = [*settings, *ALGORITHMS["ppo"]]
    remote = [
        "trainer.n_gpus_per_node=2",
        "trainer.backend=ray",
        "trainer.device=cpu",
        "ray_kwargs.ray_init.num_cpus=4",
        "ray_kwargs.ray_init.address=local",  # and no cluster that is running here
    ]
    compare(run(chosen, *remote, trainer_class=RayPPOTrainer), run(chosen))
