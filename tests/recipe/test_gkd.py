"""verl/recipe/gkd: prompts without ground truth, no rewards, and a policy that approaches its teacher."""

import json

import pytest

from examples.quickstart.tiny_model import tiny_model
from tests.trainer.runs import fit
from verl.recipe.gkd import GKDTrainer


@pytest.fixture
def distilled(settings, tiny, tmp_path):
    """The settings of a run on prompts alone."""
    rows = [json.loads(line) for line in (tiny / "train.jsonl").read_text().splitlines()]
    lines = [json.dumps({"prompt": row["prompt"]}) for row in rows]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    teacher = tiny_model("llama", tmp_path / "teacher", seed=7)
    return [
        *settings,
        f"data.train_files={tmp_path / 'prompts.jsonl'}",
        "data.val_files=[]",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        f"distillation.teacher_models.teacher.model_path={teacher}",
        "distillation.distillation_loss.topk=8",
    ]


def test_it_learns_without_rewards(distilled):
    trainer, reports = fit([*distilled, "trainer.total_training_steps=12", "actor_rollout_ref.rollout.n=8"], GKDTrainer)
    names = [op.name for op in trainer.pipeline.operators]
    assert names == ["prompts", "repeat", "gen", "sleep_rollout", "reward", "teacher", "update_actor", "sync_weights"]
    assert not any(name.startswith("critic/score") for name in reports[0].metrics)
    assert "actor/pg_loss" not in reports[0].metrics
    assert reports[-1].metrics["distillation/reverse_kl"] < 0.8 * reports[0].metrics["distillation/reverse_kl"]


def test_several_updates_have_old_log_probs(distilled):
    gradient = [
        "distillation.distillation_loss.loss_mode=k1",
        "distillation.distillation_loss.use_policy_gradient=true",
    ]
    more = ["actor_rollout_ref.actor.ppo_mini_batch_size=2", "trainer.total_training_steps=1"]
    trainer, _ = fit([*distilled, *gradient, *more], GKDTrainer)
    assert "old_log_prob" in [op.name for op in trainer.pipeline.operators]
