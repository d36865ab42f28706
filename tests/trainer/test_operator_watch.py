"""Operators of the controller that hang are ended, with their line."""

import signal
import time

import pytest

from tests.waiting import wait_until
from verl.dataflow import Operator
from verl.trainer.guards import operator_watch
from verl.trainer.guards.operator_watch import OperatorTimeout, OperatorWatch
from verl.trainer.local_trainer import LocalPPOTrainer

SHORT = ["algorithm.name=grpo", "trainer.total_training_steps=4"]


class AllBut:
    """`unwatched`: the other operators of a run may take longer than the short limits of a test."""

    def __init__(self, watched: str):
        self.watched = watched

    def __contains__(self, name: str) -> bool:
        return name != self.watched


def watch_of(trainer: LocalPPOTrainer) -> OperatorWatch:
    return next(guard for guard in trainer.guards if isinstance(guard, OperatorWatch))


def wait_until_measured(trainer: LocalPPOTrainer, *operators: str) -> None:
    """The watch looks at intervals, and an operator that it has not seen has no limit."""
    limit = watch_of(trainer)._durations.limit
    wait_until(lambda: all(limit(name).reason != "trainer.worker_timeout" for name in operators))


def hang_at(step: int, trainer_of: list, seconds: float):
    def hang(batch) -> None:
        if trainer_of[0].global_step == step and trainer_of[1]:
            trainer_of[1] -= 1
            try:
                time.sleep(seconds)
            except Exception:  # as code that tries again
                time.sleep(seconds)

    return hang


def trainer_with(settings: list[str], step: int, seconds: float, *more: str, times: int = 1) -> LocalPPOTrainer:
    given: list = [None, times]

    class Hanging(LocalPPOTrainer):
        unwatched = AllBut("check")

        def finish_flow(self, flow):
            return super().finish_flow(flow.insert_after("reward", Operator("check", hang_at(step, given, seconds))))

    trainer = Hanging(overrides=[*settings, *SHORT, *more])
    given[0] = trainer
    if "trainer.wait_factor=null" not in more:
        trainer.on_step.append(lambda report: wait_until_measured(trainer, "check", "gen"))
    return trainer


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(operator_watch, "_MARGIN_SECONDS", 0.0)
    monkeypatch.setattr(operator_watch, "_LOOK_SECONDS", 0.1)


def test_an_operator_that_hangs_is_named_and_restarted_once(settings, monkeypatch):
    """Like a lost worker. The limits hold after the restart, and a signal that interrupts nothing is sent again."""
    kill, calls = signal.pthread_kill, []

    def lose_the_first(thread: int, number: int) -> None:
        calls.append(number)
        if len(calls) > 1:
            kill(thread, number)

    monkeypatch.setattr(signal, "pthread_kill", lose_the_first)
    more = ["trainer.wait_minimum=1", "trainer.max_restarts=1", "trainer.save_freq=2", "trainer.total_training_steps=3"]
    trainer = trainer_with(settings, 3, 300.0, *more, times=2)
    with pytest.raises(OperatorTimeout) as error:
        trainer.fit()
    assert trainer.view.restarts == 1 and len(calls) >= 3
    first_line = str(error.value).splitlines()[0]
    assert first_line.startswith("operator 'check' has not ended after 1 s (limit: 10 x the median of ")
    assert "it is in hang (" in first_line and "test_operator_watch.py:" in first_line
    assert "--- thread MainThread" in str(error.value)


def test_an_operator_that_goes_on_after_its_limit_does_not_end_the_watch(settings):
    trainer, slow = trainer_with(settings, 3, 300.0, "trainer.wait_minimum=1", "trainer.total_training_steps=3"), []

    def catch_everything(name: str, seconds: float, batch) -> None:
        if name == "gen" and trainer.global_step == 2:
            try:
                trainer.view.unwatched = AllBut("gen")
                trainer.pipeline.running_since["gen"] = started = time.perf_counter() - 1000
                time.sleep(300.0)
            except BaseException:
                slow.append(started)
                trainer.pipeline.running_since.pop("gen", None)
                trainer.view.unwatched = AllBut("check")

    trainer.pipeline.observer = catch_everything
    with pytest.raises(OperatorTimeout, match="operator 'check' has not ended after 1 s"):
        trainer.fit()
    assert len(slow) == 1


@pytest.mark.slow
def test_the_first_time_and_without_a_factor_it_may_take_longer(settings):
    trainer_with(settings, 1, 4.0, "trainer.wait_minimum=1").fit()
    trainer_with(
        settings, 2, 4.0, "trainer.wait_minimum=1", "trainer.wait_factor=null", "trainer.resume_mode=disable"
    ).fit()


@pytest.mark.fast("1")
@pytest.mark.parametrize("timeout", ["30", "1"])
def test_a_slow_reward_that_its_timeout_allows_does_not_end_the_run(settings, paid_by, timeout):
    more = [paid_by("time.sleep(2.5 * (calls == 20))", "return 0.0"), "trainer.wait_minimum=1"]
    more += [f"reward.timeout={timeout}", "reward.on_error=count", "reward.max_failure_rate=0.5"]
    metrics = []
    trainer = LocalPPOTrainer(overrides=[*settings, *SHORT, *more])
    trainer.view.unwatched = AllBut("reward")
    trainer.on_step.append(lambda report: metrics.append(report.metrics))
    trainer.on_step.append(lambda report: wait_until_measured(trainer, "reward"))
    trainer.fit()
    assert sum(step["reward/failed_rows"] for step in metrics) == (0 if timeout == "30" else 1)
