"""A run whose gradients are not finite: single updates are skipped, and a run that can make none ends."""

from collections.abc import Collection
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from tests.trainer.runs import lines, steps_in, uids_of
from verl.data.order import ResumableSampler
from verl.trainer.guards.base import ROLL_BACK, SKIP
from verl.trainer.guards.restarts import BadSteps
from verl.trainer.local_trainer import LocalPPOTrainer
from verl.trainer.state.checkpointing import BadStepsError

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


def run(settings: list[str], folder, broken: Collection[int], *overrides: str, seen: list | None = None) -> list[float]:
    """The share of updates that each step skipped; two updates a step, numbered from 1. seen: gets their prompts."""
    (folder / "loss.py").write_text(LOSS.replace("{BROKEN}", repr(broken)))
    chosen = [f"imports=[{folder / 'loss.py'}]", "algorithm.name=rloo", "algorithm.use_kl_in_reward=false"]
    chosen += ["actor_rollout_ref.actor.policy_loss.loss_mode=sometimes_broken", "trainer.total_training_steps=8"]
    trainer = LocalPPOTrainer(overrides=[*settings, *chosen, *overrides])
    found = []
    trainer.on_step.append(lambda report: found.append(report.metrics["actor/grad_skipped"]))
    if seen is not None:
        trainer.on_step.append(lambda report: seen.append(uids_of(report)))
    trainer.fit()
    return found


@pytest.mark.fast("broken1*")
@pytest.mark.parametrize(
    ("broken", "overrides", "message"),
    [
        (range(100), "", r"5 steps in a row had skipped updates .*; no checkpoint was saved"),
        (range(7, 100), "max_skipped_steps=2 save_freq=3", r"2 steps in a row.* newest checkpoint is .*global_step_3$"),
        ((1, 4), "max_skipped_steps=2", r"2 steps in a row had skipped updates \(actor/grad_skipped 0.5 in"),
    ],
)
def test_a_run_that_cannot_update_ends(broken, overrides, message, settings, tmp_path):
    """The message names the checkpoint, if there is any. One skipped update of two makes a step bad."""
    with pytest.raises(FloatingPointError, match=message):
        run(settings, tmp_path, broken, *(f"trainer.{text}" for text in overrides.split()))


@pytest.mark.slow
def test_resuming_starts_before_the_steps_that_changed_nothing(settings, tmp_path):
    often = ["trainer.max_skipped_steps=3", "trainer.save_freq=1", "trainer.allow_change=[code]"]
    for broken in (range(5, 100), range(100)):  # the second run is of updates that are all broken
        with pytest.raises(FloatingPointError, match=r"3 steps in a row.* newest checkpoint is .*global_step_2$"):
            run(settings, tmp_path, broken, *often)
        assert steps_in(tmp_path / "run")[-1] == 2


def test_a_run_continues_after_fewer_bad_steps_than_the_limit(settings, tmp_path):
    broken = range(2, 6)
    found = run(settings, tmp_path, broken, "trainer.max_skipped_steps=4")
    updates = [float(number in broken) for number in range(1, 17)]
    assert found == [sum(pair) / 2 for pair in zip(updates[::2], updates[1::2])]


def diverge(settings, steps: int, lr: str, *overrides: str) -> LocalPPOTrainer:
    chosen = [*settings, "algorithm.name=grpo", "trainer.save_freq=1", f"trainer.total_training_steps={steps}"]
    return LocalPPOTrainer(overrides=[*chosen, f"actor_rollout_ref.actor.optim.lr={lr}", *overrides])


@pytest.mark.parametrize(
    ("steps", "lr", "message"),
    [(1, "1e39", "NaN, .* in .* more"), (3, "1e8", ".*weights beyond 1e6")],  # beyond float32, and exploding
)
def test_broken_weights_end_the_run_in_their_step_and_are_never_saved(steps, lr, message, settings, tmp_path):
    with pytest.raises(FloatingPointError, match=rf"step 1 is not saved: the actor contains {message}"):
        diverge(settings, steps, lr).fit()
    assert steps_in(tmp_path / "run") == []


@pytest.mark.slow
@pytest.mark.parametrize("background", [pytest.param("false", marks=pytest.mark.slow), "true"])
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
    message = r"step 3 is not saved: the actor contains NaN, .* in .*; the same command resumes from .*global_step_2$"
    with pytest.raises(FloatingPointError, match=message):
        trainer.fit()
    assert steps_in(tmp_path / "run") == [2]
    resumed = diverge(settings, 3, "1e-3", *keep_one)
    resumed.fit()
    assert resumed.global_step == 3 and (tmp_path / "run/global_step_3").is_dir()


def test_a_step_with_one_skipped_update_of_two_is_bad(settings, tmp_path):
    """It is neither saved nor forgotten: the checkpoint that was due follows at the next good step."""
    run(settings, tmp_path, range(4, 5), "trainer.save_freq=2", "trainer.total_training_steps=5")
    assert steps_in(tmp_path / "run") == [3, 4]


COLUMN = """
from verl.algorithms.advantages import register_adv_est

@register_adv_est("sometimes_bad")
def sometimes_bad(token_level_rewards, response_mask, global_step=None):
    advantages = token_level_rewards.sum(1, keepdim=True) * response_mask
    advantages[3] = {VALUE}
    return advantages, advantages
"""


@pytest.mark.fast("float('nan')", "1e30")
@pytest.mark.parametrize("value", ["float('nan')", "float('-inf')", "1e30"])
def test_a_bad_column_never_reaches_the_weights(value, settings, tmp_path, caplog):
    (tmp_path / "bad.py").write_text(COLUMN.replace("{VALUE}", value))
    chosen = [*settings, f"imports=[{tmp_path / 'bad.py'}]", "algorithm.adv_estimator=sometimes_bad"]
    trainer = LocalPPOTrainer(overrides=[*chosen, "trainer.total_training_steps=2", "trainer.max_skipped_steps=3"])
    weights, rates = [], []
    trainer.on_step.append(lambda report: rates.append((report["actor/grad_skipped"], report["actor/lr"])))
    trainer.on_step.append(lambda _: weights.append(trainer.roles["actor"].worker.engine.module.lm_head.weight.clone()))
    trainer.fit()
    start = trainer.config.actor_rollout_ref.model.path
    assert rates == [(1.0, 1e-3)] * 2  # the learning-rate schedule advances as in any other step
    initial = load_file(f"{start}/model.safetensors")["lm_head.weight"]
    assert all(torch.equal(found, initial) for found in weights)
    assert "actor: column 'advantages' has" in caplog.text and "at row 3, token 0" in caplog.text


THREADS = [pytest.param(0, marks=pytest.mark.slow), 2]


@pytest.mark.parametrize("threads", THREADS)
def test_a_run_rolls_back_once_and_skips_the_prompts(settings, tmp_path, threads):
    """Updates 9 to 12 (steps 5 and 6) are broken: the run returns to step 4 and reads the prompts after step 6."""
    seen = []
    rollback = ["trainer.on_bad_steps=rollback", "trainer.max_skipped_steps=2", "trainer.save_freq=2"]
    threads = f"data.dataloader_num_workers={threads}"
    found = run(settings, tmp_path, range(9, 13), *rollback, threads, seen=seen)
    assert found == [0, 0, 0, 0, 1, 0, 0, 0, 0]  # steps 1 to 5, the error of step 6, and steps 5 to 8
    sampler = ResumableSampler(24, 4, seed=42)
    drawn = [sorted({f"{epoch}:{row}" for epoch, row in sampler.next_items()}) for _ in range(10)]
    assert seen == drawn[:5] + drawn[6:]
    assert [line["step"] for line in lines(tmp_path / "run/metrics.jsonl")] == list(range(1, 9))


@pytest.mark.slow
@pytest.mark.parametrize("threads", THREADS)
def test_a_rollback_with_dynamic_sampling_repeats_no_prompt(settings, tmp_path, threads):
    """The queue of prompts is that of the bad step, not that of the checkpoint."""
    seen = []
    rollback = ["trainer.on_bad_steps=rollback", "trainer.max_skipped_steps=2", "trainer.save_freq=1"]
    groups = ["algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=seq_reward"]
    chosen = [*rollback, *groups, "trainer.total_training_steps=4", f"data.dataloader_num_workers={threads}"]
    run(settings, tmp_path, range(5, 9), *chosen, seen=seen)  # steps 3 and 4
    assert len(seen) == 5 and not set(seen[2]) & {uid for uids in seen[3:] for uid in uids}


@pytest.mark.parametrize(("limit", "last"), [(0, None), (1, 1), (2, 4), (3, 5)])
def test_the_limit_counts_bad_steps_in_a_row(limit, last):
    """The steps 1, 3, 4, 5 and 6 are bad."""
    settings = SimpleNamespace(max_skipped_steps=limit)
    checkpointer = SimpleNamespace(wait=lambda: None, newest=lambda: "resume from step 0")
    guard, view = BadSteps(SimpleNamespace(trainer=settings)), SimpleNamespace(checkpointer=checkpointer)

    def check(step: int) -> None:
        report = SimpleNamespace(step=step, metrics={"actor/grad_skipped": float(step != 2), "actor/lr": 1.0})
        assert guard.after_step(view, report) == (SKIP if step != 2 and limit > 0 else None)

    for step in range(1, last or 7):
        check(step)
    if last is not None:
        with pytest.raises(BadStepsError, match=rf"^{limit} steps in a row had .* in step {last}.*resume from step 0"):
            check(last)


@pytest.mark.parametrize(
    ("rollbacks", "path", "note"),
    [(0, "step", None), (1, "step", "the run has rolled back once already"), (0, None, "there is no checkpoint yet")],
)
def test_a_run_rolls_back_once_and_to_a_checkpoint(rollbacks, path, note):
    guard = BadSteps(SimpleNamespace(trainer=SimpleNamespace(on_bad_steps="rollback")))
    view = SimpleNamespace(interrupted=None, checkpointer=SimpleNamespace(rollbacks=rollbacks, saved_path=path))
    error = BadStepsError("2 steps in a row")
    assert guard.on_error(view, error) == (ROLL_BACK if note is None else None)
    assert getattr(error, "__notes__", []) == ([] if note is None else [f"trainer.on_bad_steps=rollback: {note}"])
