"""The recipes on Ray, whose batches travel as references: the numbers of one process."""

import pytest

from tests.trainer.runs import fit
from verl.recipe.dapo import DAPOTrainer
from verl.recipe.dpo import DPOTrainer
from verl.recipe.prime import PRIMETrainer

_OVERLONG = "reward.reward_kwargs.overlong_buffer.len=4"
RECIPES = {
    "dapo": (DAPOTrainer, ["data.gen_batch_size=3", _OVERLONG]),
    "dpo": (DPOTrainer, []),
    "prime": (PRIMETrainer, ["prime.filter.oversample_factor=2"]),
}
REMOTE = ["trainer.n_gpus_per_node=2", "trainer.backend=ray", "trainer.device=cpu", "ray_kwargs.ray_init.num_cpus=4"]


def run(trainer_class: type, overrides: list[str]) -> list[list[float]]:
    reports = fit([*overrides, "trainer.total_training_steps=2", "trainer.resume_mode=disable"], trainer_class)[1]
    names = ("critic/score/mean", "response_length/mean", "actor/grad_norm")
    return [[report.metrics[name] for name in names] for report in reports]


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_ray_gives_the_numbers_of_one_process(name, settings):
    pytest.importorskip("ray")
    trainer_class, further = RECIPES[name]
    # a small step: those of AdamW amplify the rounding of sums
    chosen = [*settings, *further, "actor_rollout_ref.actor.optim.lr=1e-5"]
    expected = run(trainer_class, chosen)
    found = run(trainer_class, [*chosen, *REMOTE])
    for a, b in zip(found, expected, strict=True):
        assert a == pytest.approx(b, rel=1e-3)
