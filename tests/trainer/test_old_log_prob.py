"""The pass for old log-probs is spared where the only update of a step has them: the same numbers, one pass less."""

import pytest

from tests.trainer.runs import untimed, weight_sum
from verl import Operator
from verl.trainer.local_trainer import LocalPPOTrainer

SINGLE = "actor_rollout_ref.actor.ppo_mini_batch_size=4"
FORCE = "actor_rollout_ref.actor.old_log_prob_pass=always"
KL = "actor_rollout_ref.actor.use_kl_loss=true"
REF = "actor_rollout_ref.ref.enable=true"
NO_KL = "algorithm.use_kl_in_reward=false"


def run(settings: list[str], *overrides: str) -> tuple[tuple[str, ...], list[dict[str, float]]]:
    """(names of the operators, metrics of each step and a sum over the weights that every one of them counts in)."""
    steps = []
    trainer = LocalPPOTrainer(overrides=[*settings, SINGLE, *overrides, "trainer.total_training_steps=2"])

    trainer.on_step.append(lambda report: steps.append(untimed(report) | {"weights": weight_sum(trainer)}))
    trainer.fit()
    return tuple(op.name for op in trainer.pipeline.operators), steps


@pytest.mark.fast("overrides1")
@pytest.mark.parametrize(
    "overrides",
    [
        ("algorithm.name=grpo", KL),
        ("algorithm.name=ppo", NO_KL, "actor_rollout_ref.actor.entropy_coeff=0.01"),
        ("algorithm.name=rloo", NO_KL, REF, "actor_rollout_ref.rollout.temperature=0.7"),
    ],
)
def test_one_pass_gives_the_numbers_of_two(overrides, settings, tmp_path):
    folder = f"trainer.default_local_dir={tmp_path}"
    cut = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=3"  # metrics of several micro-batches are merged
    names, one = run(settings, *overrides, cut)
    with_pass, two = run(settings, *overrides, cut, f"{folder}/two", FORCE)
    assert "old_log_prob" not in names
    assert "old_log_prob" in with_pass
    assert len(one) == 2
    for spared, expected in zip(one, two):
        assert spared.keys() == expected.keys()
        assert spared == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert 0 < one[-1]["rollout/logprob_gap_mean"] <= one[-1]["rollout/logprob_gap_max"] < 1e-4


def look(batch) -> None:
    batch.batch["old_log_probs"].mean()


class Looking(LocalPPOTrainer):
    """An operator that does not promise what it reads: it may read what the pass writes, and this one does."""

    def build_flow(self):
        return super().build_flow().insert_before("adv", Operator("look", look))


@pytest.mark.parametrize(
    ("trainer", "overrides"),
    [
        (LocalPPOTrainer, (FORCE,)),
        (LocalPPOTrainer, ("actor_rollout_ref.actor.ppo_mini_batch_size=2",)),
        (LocalPPOTrainer, ("actor_rollout_ref.actor.ppo_epochs=2",)),
        (LocalPPOTrainer, ("algorithm.use_kl_in_reward=true",)),
        (LocalPPOTrainer, ("algorithm.rollout_correction.rollout_is=token",)),
        (LocalPPOTrainer, ("algorithm.name=ppo", NO_KL, "trainer.critic_warmup=1")),
        (Looking, ()),
    ],
)
def test_the_pass_stays_where_something_needs_it(trainer, overrides, settings):
    flow = trainer(overrides=[*settings, "algorithm.name=grpo", SINGLE, *overrides]).pipeline
    assert "old_log_prob" in [op.name for op in flow.operators]
