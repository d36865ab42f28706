"""When a run saves: at its end, after SIGINT or SIGTERM, at its best validation; and early stopping."""

import json
import math
import os
import re
import signal
import threading
import time
from types import SimpleNamespace

import pytest

from tests.trainer.runs import lines, metrics_of, steps_in
from verl.checkpoints import store
from verl.config.schema import TrainerConfig
from verl.engines.checkpoint import ShardWriter
from verl.trainer.guards.early_stopping import Best, ValidationWatch
from verl.trainer.guards.interruption import Interruption, Stopped
from verl.trainer.local_trainer import LocalPPOTrainer
from verl.trainer.main_ppo import main
from verl.trainer.startup.launch import run as launch
from verl.trainer.state import checkpointing
from verl.trainer.state.checkpointing import Checkpointer

METRIC = "val-core/task/acc/mean@1"


def validated(folder, step: int) -> bool:
    return any(name.startswith("val-core/") for name in metrics_of(folder)[step])


def scripted(trainer: LocalPPOTrainer, values: dict[int, float]) -> LocalPPOTrainer:
    """Let the validations of a trainer give these values: step -> value."""
    trainer.validate = lambda: {METRIC: values[trainer.global_step]}
    return trainer


def signalled_in_step(trainer: LocalPPOTrainer, step: int, *numbers: int) -> LocalPPOTrainer:
    """Let a trainer receive signals in the middle of a step: when the advantages are computed."""
    operator = next(op for op in trainer.pipeline.operators if op.name == "adv")
    func = operator.func

    def signalled(*args, **kwargs):
        if trainer.global_step == step:
            for number in numbers:
                os.kill(os.getpid(), number)
        return func(*args, **kwargs)

    object.__setattr__(operator, "func", signalled)
    return trainer


@pytest.fixture
def chosen(settings) -> list[str]:
    kept = [s for s in settings if not s.startswith("trainer.save_at_end")]
    return [*kept, "algorithm.adv_estimator=grpo"]


# ---- the end of a run -----------------------------------------------------------------------------------------------


@pytest.mark.fast("given0-saved0", "given2-saved2")
@pytest.mark.parametrize(
    ("given", "saved"),
    [
        (["trainer.save_freq=-1"], [3]),
        pytest.param(["trainer.save_freq=2"], [2, 3], marks=pytest.mark.slow),
        (["trainer.save_freq=2", "trainer.save_at_end=false"], [2]),
        (["trainer.save_at_end=false"], []),
    ],
)
def test_a_run_saves_at_its_end(given, saved, chosen, tmp_path, caplog):
    caplog.set_level("INFO")
    LocalPPOTrainer(overrides=[*chosen, *given, "trainer.total_training_steps=3"]).fit()
    assert steps_in(tmp_path / "run") == saved
    assert ("the trained model will not be saved" in caplog.text) == (not saved)
    assert ("nothing with trainer.save_at_end=false" in caplog.text) == (given == ["trainer.save_freq=-1"])


@pytest.mark.slow
def test_training_goes_on_while_checksums_are_computed(chosen, tmp_path, caplog, monkeypatch):
    """The end of the run waits for them, and says so."""
    gate, seal, write = threading.Event(), store._seal, ShardWriter.write
    monkeypatch.setattr(ShardWriter, "write", lambda shards: time.sleep(0.2) or write(shards))
    monkeypatch.setattr(store, "_seal", lambda *arguments: (gate.wait(60) and time.sleep(0.1)) or seal(*arguments))
    monkeypatch.setattr(checkpointing, "_REPORT_INTERVAL", 0.02)
    caplog.set_level("INFO")
    saving = ["trainer.save_freq=1", "trainer.save_at_end=false", "actor_rollout_ref.actor.checkpoint.async_save=true"]
    trainer = LocalPPOTrainer(overrides=[*chosen, *saving, "trainer.total_training_steps=3"])
    trainer.checkpointer.save = lambda step, is_due: step == 1 and Checkpointer.save(trainer.checkpointer, step, is_due)
    trainer.on_step.append(lambda report: gate.set() if report.step == 3 and not steps_in(tmp_path / "run") else None)
    trainer.fit()
    assert gate.is_set() and steps_in(tmp_path / "run") == [1]
    assert re.search(r"\[save\] blocked for \d", caplog.text)
    assert re.search(r"\[save\] writing_global_step_1: [.\d]+ .*B in \d s", caplog.text)


# ---- signals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "status"), [pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow), (signal.SIGTERM, 143)]
)
def test_a_signal_finishes_the_step_and_saves_it(number, status, chosen, tmp_path, capsys):
    """The run is resumed by the same command, and its metrics are those of an uninterrupted run."""
    run, before = tmp_path / "run", [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    plain = [*chosen, "trainer.test_freq=2", "trainer.total_training_steps=4", "trainer.save_best=true"]
    stopped = signalled_in_step(LocalPPOTrainer(overrides=plain), 2, number)
    assert launch(lambda: stopped) == status
    message = f"stopped by {number.name} after step 2 of 4; the same command resumes from {run}/global_step_2"
    assert capsys.readouterr().err.splitlines()[-1] == message
    assert steps_in(run) == [2]
    assert not validated(run, 2)  # the validation of step 2 is left to the resumed run
    LocalPPOTrainer(overrides=plain).fit()
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before
    interrupted, best = metrics_of(run), json.loads((run / "best_checkpoint.json").read_text())
    straight = tmp_path / "straight"
    LocalPPOTrainer(overrides=[*plain, f"trainer.default_local_dir={straight}"]).fit()
    assert interrupted == metrics_of(straight) and validated(run, 2)
    expected = json.loads((straight / "best_checkpoint.json").read_text())
    assert {**best, "saved_as_best": None} == {**expected, "saved_as_best": None}


def test_a_signal_between_two_steps_saves_too(chosen, tmp_path):
    trainer = LocalPPOTrainer(overrides=[*chosen, "trainer.total_training_steps=4"])
    trainer.on_step.append(lambda report: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(Stopped) as stop:
        trainer.fit()
    assert stop.value.finished and stop.value.exit_status == 143
    assert steps_in(tmp_path / "run") == [1]


def test_the_same_sigint_sent_twice_is_one_request(caplog):
    """`timeout` sends it to its child and to the process group."""
    view = SimpleNamespace(step=1, total_steps=4, interrupted=None)
    interruption = Interruption(SimpleNamespace(trainer=TrainerConfig(save_at_end=False)))
    interruption.before_step(view)
    try:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
        assert view.interrupted == signal.SIGINT
        interruption._received -= 0.6
        with pytest.raises(Stopped) as stop:
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        interruption.at_end(view)
    assert stop.value.second and not stop.value.finished
    assert caplog.messages == ["SIGINT: finishing step 1 of 4; a second Ctrl-C stops at once"]


TWICE, RESUMES = [signal.SIGINT] * 2, "; the same command resumes from {run}/global_step_1"


@pytest.mark.fast("2-numbers0*", "1-numbers2*", "1-numbers3*")
@pytest.mark.parametrize(
    ("step", "numbers", "override", "status", "saved", "shown"),
    [
        # at once, with the last checkpoint
        (2, TWICE, "save_freq=1", 130, [1], f"stopped by a second SIGINT in step 2 of 4{RESUMES}"),
        # one request: launchers send it to every process, and some forward it to their children
        (1, [signal.SIGTERM] * 3, "save_freq=-1", 143, [1], f"stopped by SIGTERM after step 1 of 4{RESUMES}"),
        (
            *(1, [signal.SIGINT], "save_at_end=false", 130, []),
            r"stopped by SIGINT after step 1 of 4; no checkpoint was saved \(trainer.save_freq is -1, .*",
        ),
        (1, [signal.SIGTERM], "total_training_steps=1", 0, [1], ".*"),  # in the last step: a normal end
    ],
)
def test_how_signals_end_a_run(step, numbers, override, status, saved, shown, chosen, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("verl.trainer.guards.interruption.REPEAT_SECONDS", 0.0)
    plain = [*chosen, "trainer.total_training_steps=4", f"trainer.{override}"]
    trainer = signalled_in_step(LocalPPOTrainer(overrides=plain), step, *numbers)
    assert launch(lambda: trainer) == status
    (last_line,) = capsys.readouterr().err.splitlines()[-1:] or [""]
    assert re.fullmatch(shown.format(run=tmp_path / "run"), last_line)
    assert steps_in(tmp_path / "run") == saved


def test_a_run_in_another_thread_leaves_the_handlers(chosen, tmp_path):
    before, failed = signal.getsignal(signal.SIGINT), []
    trainer = LocalPPOTrainer(overrides=[*chosen, "trainer.total_training_steps=1"])
    trainer.on_step.append(lambda report: failed.append(signal.getsignal(signal.SIGINT) is not before))
    thread = threading.Thread(target=trainer.fit)
    thread.start()
    thread.join()
    assert failed == [False] and steps_in(tmp_path / "run") == [1]


# ---- the best checkpoint --------------------------------------------------------------------------------------------

SERIES = {0: 0.9, 1: 0.2, 2: 0.5, 3: 0.7, 4: 0.6, 5: 0.7, 6: 0.1}  # the best trained step is 3


@pytest.mark.slow
def test_the_best_checkpoint_is_kept_beside_the_newest(chosen, tmp_path):
    plain = [*chosen, f"trainer.save_best={METRIC}", "trainer.test_freq=1", "trainer.max_actor_ckpt_to_keep=1"]
    plain += ["trainer.total_training_steps=6", "trainer.val_before_train=true"]
    scripted(LocalPPOTrainer(overrides=plain), SERIES).fit()
    run = tmp_path / "run"
    assert steps_in(run) == [3, 6]
    record = {"metric": METRIC, "value": 0.7, "step": 3, "mode": "max", "saved_as_best": True}
    assert json.loads((run / "best_checkpoint.json").read_text()) == record
    assert os.readlink(run / "best") == "global_step_3"
    resumed = [*plain, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={run / 'best'}"]
    again = LocalPPOTrainer(overrides=[*resumed, "trainer.total_training_steps=4"])
    scripted(again, SERIES).fit()
    assert again.global_step == 4
    validated = [line["step"] for line in lines(run / "metrics.jsonl") if METRIC in line]
    # before the first step of the fresh run, not of the resumed one; without val_before_train, after the steps only
    assert validated == [0, 1, 2, 3, 4]
    without = ["trainer.val_before_train=false", "trainer.resume_mode=disable", "trainer.total_training_steps=1"]
    fresh = LocalPPOTrainer(overrides=[*plain, *without])
    calls = []
    fresh.validate = lambda: calls.append(fresh.global_step) or {METRIC: 0.5}
    fresh.fit()
    assert calls == [1]


@pytest.mark.parametrize("kept", [1, pytest.param(None, marks=pytest.mark.slow)])
def test_a_resumed_run_has_the_best_of_an_uninterrupted_one(kept, chosen, tmp_path):
    """Also if the process was killed between the checkpoint and best_checkpoint.json."""
    best = tmp_path / "run" / "best_checkpoint.json"
    plain = [*chosen, "trainer.save_best=true", "trainer.test_freq=1", "trainer.save_freq=2"]
    plain += [f"trainer.max_actor_ckpt_to_keep={kept}"] if kept else []
    for steps in (4, 6):
        best.unlink(missing_ok=True)
        scripted(LocalPPOTrainer(overrides=[*plain, f"trainer.total_training_steps={steps}"]), SERIES).fit()
    assert steps_in(tmp_path / "run") == ([3, 6] if kept else [2, 3, 4, 6])  # 1 was superseded, and was not due
    record = json.loads(best.read_text())
    assert record["step"] == 3 and not record["saved_as_best"], "of a lost record, a later best deletes nothing"


@pytest.mark.parametrize(("mode", "step"), [("auto", 1), ("min", 2)])
def test_whether_lower_is_better(mode, step):
    watch = watch_with(TrainerConfig(save_best=True, save_best_mode=mode))
    for number, value in enumerate((0.5, 0.1, 0.3), 1):
        watch.observe(number, {METRIC: value})
    assert watch.best.step == step


def test_a_metric_that_does_not_exist_is_refused_before_training(chosen):
    trainer = LocalPPOTrainer(
        overrides=[*chosen, "trainer.save_best=val/acc", "trainer.test_freq=1", "trainer.val_before_train=true"]
    )
    with pytest.raises(ValueError, match=r"the validation has no metric 'val/acc'.*known: .*val-core/"):
        trainer.fit()
    assert trainer.global_step == 0


def test_a_metric_of_a_custom_validation_is_suggested():
    watch = watch_with(TrainerConfig(save_best="mine/scor"))
    with pytest.raises(ValueError, match=r"no metric 'mine/scor': did you mean .?mine/score") as error:
        watch.value_of({METRIC: 0.5, "mine/score": 1.0, "other/score": 1.0})
    assert "other/score" not in str(error.value)


@pytest.mark.slow
def test_a_metric_that_the_first_validation_does_not_have_loses_no_step(chosen, tmp_path, capsys):
    plain = [*chosen, "trainer.save_best=val/acc", "trainer.test_freq=2", "trainer.total_training_steps=4"]
    assert launch(lambda: scripted(LocalPPOTrainer(overrides=plain), SERIES)) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("error: trainer.save_best: the validation has no metric 'val/acc'")
    assert "in step 2 of 4; the same command resumes from" in shown and steps_in(tmp_path / "run") == [2]
    plain[-3] = f"trainer.save_best={METRIC}"
    assert launch(lambda: scripted(LocalPPOTrainer(overrides=plain), SERIES)) == 0
    assert json.loads((tmp_path / "run" / "best_checkpoint.json").read_text())["step"] == 4


def watch_with(settings: TrainerConfig) -> ValidationWatch:
    return ValidationWatch(SimpleNamespace(trainer=settings))


@pytest.mark.parametrize("given", [METRIC, True])
def test_a_validation_without_the_metric_is_no_improvement(given, caplog):
    watch = watch_with(TrainerConfig(save_best=given))
    values = [{METRIC: math.nan}, {METRIC: 0.5}, {"val-core/task/reward/mean@1": 9.0}, {}, {METRIC: 0.6}]
    improved = []
    for step, metrics in enumerate(values, 1):
        watch.observe(step, metrics)
        improved.append(watch.is_best(step))
    assert improved == [False, True, False, False, True] and watch.best == Best(METRIC, 0.6, 5, "max")
    assert [record.args[0] for record in caplog.records] == [1, 3, 4]


@pytest.mark.parametrize("key", ["save_best=true", "early_stopping.patience=2"])
def test_without_validations_there_is_no_best(key, chosen, capsys):
    assert main([*chosen, f"trainer.{key}"]) == 1
    assert f"trainer.{key.partition('=')[0]} is set, but trainer.test_freq is -1" in capsys.readouterr().err


# ---- early stopping -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "values", "last"),
    [
        # best 0.7 at step 3; 4, 5 and 6 are not better: the third one ends the run
        ({"patience": 3}, [0.2, 0.5, 0.7, 0.6, 0.7, 0.1, 0.9], 6),
        ({"patience": 1}, [0.2, 0.5, 0.7, 0.6, 0.7, 0.1, 0.9], 4),
        # 0.55 and 0.6 are not more than 0.1 above 0.5, which stays the reference
        ({"patience": 2, "min_delta": 0.1}, [0.2, 0.5, 0.55, 0.6, 0.9], 4),
        ({"patience": 2, "mode": "min"}, [0.5, 0.4, 0.45, 0.39, 0.5, 0.39, 0.1], 6),
        ({"patience": 2}, [0.1, math.nan, 0.1, 0.4], 3),
        ({"patience": 2}, [0.1, 0.2, 0.3, 0.4, 0.5], None),
    ],
)
def test_patience_counted_by_hand(given, values, last):
    """Also when the state is saved and restored after every validation."""
    given = dict(given)
    config = TrainerConfig(save_best_mode=given.pop("mode", "auto"), early_stopping=given, save_best=False)
    watch, ended = watch_with(config), None
    for step, value in enumerate(values, 1):
        watch.observe(step, {METRIC: value})
        if watch.reason and not ended:
            ended = step
        state, watch = watch.state_dict(), watch_with(config)
        watch.load_state_dict(json.loads(json.dumps(state)))
    assert ended == last


def test_early_stopping_is_a_normal_end_and_survives_an_interruption(chosen, tmp_path, caplog):
    caplog.set_level("INFO")
    plain = [*chosen, "trainer.early_stopping.patience=1", "trainer.test_freq=1", "trainer.total_training_steps=7"]
    series = {1: 0.2, 2: 0.5, 3: 0.4, 4: 0.9}
    trainer = scripted(LocalPPOTrainer(overrides=plain), series)
    trainer.on_step.append(lambda report: report.step == 2 and os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(Stopped):
        trainer.fit()
    trainer = scripted(LocalPPOTrainer(overrides=plain), series)
    trainer.fit()
    assert trainer.global_step == 3 and steps_in(tmp_path / "run") == [2, 3]
    reason = f"{METRIC} has not improved in 1 validations (best: 0.5 at step 2; trainer.early_stopping.patience=1)"
    assert trainer.view.end_reason == reason and f"stopped at step 3 of 7: {reason}" in caplog.text
    again = scripted(LocalPPOTrainer(overrides=plain), series)
    again.fit()
    assert again.global_step == 3 and "nothing to train" in caplog.text


@pytest.mark.parametrize(
    ("metrics", "name", "value", "mode"),
    [
        ({"val-core/a/acc/mean@4": 0.5, "val-core/a/acc/best@4": 0.9}, "val-core/a/acc/mean@4", 0.5, "max"),
        ({"val-core/b/acc/mean@1": 0.5, "val-core/a/acc/mean@1": 0.25},
         "mean of val-core/a/acc/mean@1, val-core/b/acc/mean@1", 0.375, "max"),
        ({"val/loss": 2.0}, "val/loss", 2.0, "min"),
    ],
)  # fmt: skip
def test_the_main_metric(metrics, name, value, mode):
    watch = watch_with(TrainerConfig(save_best=True))
    watch.observe(5, metrics)
    assert watch.best == Best(name, value, 5, mode)


def test_another_metric_does_not_take_over_the_best_value(caplog):
    watch = watch_with(TrainerConfig(save_best="val/a"))
    watch.observe(1, {"val/a": 0.9})
    other = watch_with(TrainerConfig(save_best="val/b"))
    other.load_state_dict(watch.state_dict())
    assert other.best is None and "the best value of val/a in the checkpoint is not used" in caplog.text
