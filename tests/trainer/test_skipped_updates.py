"""A run whose gradients are not finite: single updates are skipped, and a run that can make none ends."""

import pytest

from verl.trainer.local_trainer import LocalPPOTrainer

LOSS = """
from verl.algorithms.masked import agg_loss
from verl.algorithms.policy_losses import register_policy_loss

calls = 0

@register_policy_loss("sometimes_broken")
def sometimes_broken(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, *, broken=()):
    global calls
    calls += 1
    loss = -log_prob * advantages
    if calls in {BROKEN}:
        loss = (log_prob - log_prob.detach()).sqrt()  # 0, with an infinite slope
    return agg_loss(loss, response_mask, loss_agg_mode), {}
"""


def run(settings: list[str], folder, broken: range, *overrides: str) -> list[float]:
    """The share of updates that each step skipped; two updates a step, numbered from 1."""
    (folder / "loss.py").write_text(LOSS.replace("{BROKEN}", repr(broken)))
    trainer = LocalPPOTrainer(
        overrides=[
            *settings,
            f"imports=[{folder / 'loss.py'}]",
            "algorithm.name=rloo",
            "algorithm.use_kl_in_reward=false",
            "actor_rollout_ref.actor.policy_loss.loss_mode=sometimes_broken",
            "trainer.total_training_steps=8",
            *overrides,
        ]
    )
    found = []
    trainer.on_step.append(lambda report: found.append(report.metrics["actor/grad_skipped"]))
    trainer.fit()
    return found


def test_a_run_that_cannot_update_ends(settings, tmp_path):
    with pytest.raises(FloatingPointError, match=r"actor/grad_skipped was 1 for 5 steps .*; no checkpoint was saved"):
        run(settings, tmp_path, range(100))


def test_what_was_saved_is_named(settings, tmp_path):
    with pytest.raises(FloatingPointError, match=r"for 2 steps in a row.* newest checkpoint is .*run/global_step_3$"):
        run(settings, tmp_path, range(7, 100), "trainer.max_skipped_steps=2", "trainer.save_freq=3")


def test_resuming_starts_before_the_steps_that_changed_nothing(settings, tmp_path):
    often = ["trainer.max_skipped_steps=3", "trainer.save_freq=1"]
    for broken in (range(5, 100), range(100)):  # the second run is of updates that are all broken
        with pytest.raises(FloatingPointError, match=r"3 steps in a row.* newest checkpoint is .*global_step_2$"):
            run(settings, tmp_path, broken, *often)
        assert max(tmp_path.glob("run/global_step_*")).name == "global_step_2"


@pytest.mark.parametrize(("broken", "limit"), [(range(2, 6), 2), (range(1, 7), 0)])
def test_a_run_continues_if_some_updates_succeed(broken, limit, settings, tmp_path):
    found = run(settings, tmp_path, broken, f"trainer.max_skipped_steps={limit}")
    updates = [float(number in broken) for number in range(1, 17)]
    assert found == [sum(pair) / 2 for pair in zip(updates[::2], updates[1::2])]


def diverge(settings, steps: int, lr: str, *overrides: str) -> LocalPPOTrainer:
    chosen = [*settings, "algorithm.name=grpo", "trainer.save_freq=1", f"trainer.total_training_steps={steps}"]
    return LocalPPOTrainer(overrides=[*chosen, f"actor_rollout_ref.actor.optim.lr={lr}", *overrides])


def test_weights_that_are_not_finite_are_never_saved(settings, tmp_path):
    with pytest.raises(FloatingPointError, match=r"step 1 is not saved: the actor contains NaN or infinity in .* more"):
        diverge(settings, 1, "1e39").fit()  # beyond float32
    assert not list(tmp_path.glob("run/global_step_*"))


@pytest.mark.parametrize("background", ["false", "true"])
def test_a_broken_step_leaves_the_checkpoint_that_it_would_have_replaced(settings, tmp_path, background):
    keep_one = ["trainer.max_actor_ckpt_to_keep=1"]
    keep_one += [f"actor_rollout_ref.actor.checkpoint.async_save={background}"]
    trainer = diverge(settings, 4, "1e-3", *keep_one)

    def break_a_moment(report):
        if report.step == 2:
            engine = trainer.roles["actor"].worker.engine
            state = engine.optimizer.state[engine.module.lm_head.weight]
            state["exp_avg"][3, 5] = float("nan")

    trainer.on_step.append(break_a_moment)
    message = r"step 3 is not saved: the actor contains NaN .* in .*; the same command resumes from .*global_step_2$"
    with pytest.raises(FloatingPointError, match=message):
        trainer.fit()
    assert [folder.name for folder in tmp_path.glob("run/global_step_*")] == ["global_step_2"]
    resumed = diverge(settings, 3, "1e-3", *keep_one)
    resumed.fit()
    assert resumed.global_step == 3 and (tmp_path / "run/global_step_3").is_dir()
