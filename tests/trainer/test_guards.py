"""Guards: the contract, with one of a user's file; and who may take a trainer."""

import ast
import functools
import re
from pathlib import Path

import pytest

from tests.trainer.runs import steps_in
from verl.trainer.base import GUARDS
from verl.trainer.guards.base import CONTINUE, RESTART, ROLL_BACK, SKIP, STOP, Guard, load_callbacks
from verl.trainer.local_trainer import LocalPPOTrainer
from verl.trainer.startup import launch

ROOT = Path(__file__).resolve().parents[2]
GRPO = ["algorithm.name=grpo", "trainer.total_training_steps=4", "trainer.save_at_end=false"]


def trainer_with(settings: list[str], guard: Guard, *more: str) -> LocalPPOTrainer:
    trainer = LocalPPOTrainer(overrides=[*settings, *GRPO, *more])
    trainer.guards.append(guard)
    return trainer


CALLBACKS = """
from verl.trainer.guards.base import STOP, Guard

calls = []


def until_second(view, report):
    calls.append((view.step, report["critic/score/mean"] == view.metrics["critic/score/mean"]))
    return STOP("two are enough") if report.step == 2 else None


class Counted(Guard):
    def before_step(self, view):
        calls.append(view.total_steps)


class Recorder:
    def __call__(self, view, report):
        calls.append("recorded")


def one_argument(report): ...
"""


def test_callbacks_of_the_command_line(settings, tmp_path, caplog):
    """A guard of a user's file, a function and an object; one of them ends the run, as at its last step."""
    caplog.set_level("INFO")
    (tmp_path / "callbacks.py").write_text(CALLBACKS)
    names = ("until_second", "Counted", "Recorder")
    callbacks = ",".join(f"{tmp_path / 'callbacks.py'}:{name}" for name in names)
    trainer = LocalPPOTrainer(
        overrides=[*settings, *GRPO, f"trainer.callbacks=[{callbacks}]", "trainer.save_at_end=true"]
    )
    trainer.fit()
    assert trainer.global_step == 2 and trainer.view.end_reason == "two are enough"
    assert "stopped at step 2 of 4: two are enough" in caplog.text and steps_in(tmp_path / "run") == [2]
    calls = trainer.guards[-3].after_step.__globals__["calls"]
    assert calls == [4, (1, True), "recorded", 4, (2, True), "recorded"]


@pytest.mark.parametrize(
    "name, message",
    [
        ("one_argument", "a function of (view, report)"),
        ("cals", "did you mean 'calls'"),
        ("calls", "not a callable object"),
    ],
)
def test_callbacks_that_are_none(name, message, tmp_path):
    (tmp_path / "callbacks.py").write_text(CALLBACKS)
    with pytest.raises(ValueError, match=re.escape(message)):
        load_callbacks([f"{tmp_path / 'callbacks.py'}:{name}"])
    with pytest.raises(ValueError, match=r"expected file.py:name .*, found 'callbacks.py'"):
        load_callbacks(["callbacks.py"])


class Script(Guard):
    """Returns the actions of a script, once each: (hook, step) -> action; and records its calls."""

    def __init__(self, script: dict | None = None):
        self.script, self.calls = script or {}, []

    def _call(self, hook, view):
        self.calls.append((hook, view.step))
        return self.script.pop((hook, view.step), None)

    def at_start(self, view):
        self._call("at_start", view)

    def before_step(self, view):
        self._call("before_step", view)

    def after_step(self, view, report):
        assert report.step == view.step and report.metrics is view.metrics
        return self._call("after_step", view)

    def after_validation(self, view, metrics):
        assert any(name.startswith("val-core") for name in metrics)
        return self._call("after_validation", view)

    def on_error(self, view, error):
        return self._call("on_error", view)

    def at_end(self, view):
        self._call("at_end", view)


def test_the_hooks_are_called_in_this_order(settings):
    guard = Script()
    trainer_with(settings, guard, "trainer.total_training_steps=2", "trainer.test_freq=2").fit()
    assert guard.calls == [
        *(("at_start", 0), ("before_step", 0), ("after_step", 1), ("before_step", 1), ("after_step", 2)),
        *(("after_validation", 2), ("at_end", 2)),
    ]


def test_a_skipped_step_is_not_saved_and_its_validation_does_not_count(settings, tmp_path):
    guard = Script({("after_step", 2): SKIP, ("after_step", 1): CONTINUE})
    trainer_with(settings, guard, "trainer.save_freq=2", "trainer.test_freq=1").fit()
    assert steps_in(tmp_path / "run") == [3, 4], "the checkpoint that was due follows at the next step"
    assert [step for hook, step in guard.calls if hook == "after_validation"] == [1, 3, 4]


@pytest.mark.fast("action0")
@pytest.mark.parametrize("action", [ROLL_BACK, RESTART])
def test_a_guard_returns_to_a_checkpoint(action, settings):
    """A rollback continues with the prompts after those of the undone steps, a restart repeats them."""
    guard, uids = Script({("after_step", 3): action}), []
    trainer = trainer_with(settings, guard, "trainer.save_freq=2")
    trainer.pipeline.observer = lambda name, _, batch: (
        uids.append(set(batch.non_tensor_batch["uid"])) if name == "prompts" else None
    )
    trainer.fit()
    assert [step for hook, step in guard.calls if hook == "after_step"] == [1, 2, 3, 3, 4]
    assert [call for call in guard.calls if call[0] in ("at_start", "at_end")] == [
        *(("at_start", 0), ("at_end", 3), ("at_start", 2), ("at_end", 4)),
    ]
    assert (uids[3] == uids[2]) == (action is RESTART)
    assert trainer.view.restarts == (action is RESTART)


def test_an_error_may_cost_one_step_only(settings):
    guard, left = Script({("on_error", 1): SKIP}), [1]
    trainer = trainer_with(settings, guard)

    def fail(name: str, seconds: float, batch) -> None:
        if name == "gen" and trainer.global_step == 2 and left[0]:
            left[0] -= 1
            raise OSError("a service is away")

    trainer.pipeline.observer = fail
    trainer.fit()
    assert [step for hook, step in guard.calls if hook == "after_step"] == [1, 2, 3, 4]
    assert [hook for hook, _ in guard.calls].count("at_start") == 1


def test_another_result_than_an_action_is_refused(settings):
    with pytest.raises(ValueError, match=r"Script\.after_step returned 'stop', expected None or an Action"):
        trainer_with(settings, Script({("after_step", 1): "stop"})).fit()
    assert STOP("x") == STOP("x") != STOP("y")


# ---- who may take a trainer -----------------------------------------------------------------------------------------


def _trainers() -> set[str]:
    """Names of Trainer and its subclasses in the project."""
    classes = [node for nodes in _sources().values() for node in nodes if isinstance(node, ast.ClassDef)]
    names = {"Trainer"}
    while more := {c.name for c in classes if {ast.unparse(b).split(".")[-1] for b in c.bases} & names} - names:
        names |= more
    return names


@functools.cache
def _sources() -> dict[Path, list[ast.AST]]:
    """The files that name a trainer, and their nodes."""
    paths = [path for folder in ("verl", "recipe") for path in (ROOT / folder).rglob("*.py")]
    texts = {path: path.read_text(encoding="utf-8") for path in paths}
    named = {path: text for path, text in texts.items() if "Trainer" in text or "trainer.config" in text}
    return {path: list(ast.walk(ast.parse(text))) for path, text in named.items()}


def test_no_class_takes_a_trainer_and_nobody_assigns_its_config():
    """Guards, logs and checkpoints take a view of the run. Commands are functions, and may take a trainer."""
    trainers, taken, assigned = _trainers(), [], []
    assert {"PPOTrainer", "SFTTrainer", "DPOTrainer"} <= trainers
    for path, nodes in _sources().items():
        for node in nodes:
            if isinstance(node, ast.ClassDef) and node.name not in trainers:
                for inner in (n for n in ast.walk(node) if isinstance(n, ast.arg) and n.annotation is not None):
                    words = set(ast.unparse(inner.annotation).replace("'", "").replace("|", " ").split())
                    taken += [f"{path.name}: {node.name}"] if words & trainers else []
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            assigned += [f"{path.name}: {ast.unparse(t)}" for t in targets if t and _is_config_of_a_trainer(t)]
    assert taken == [] and assigned == []


def _is_config_of_a_trainer(target: ast.AST) -> bool:
    return isinstance(target, ast.Attribute) and ast.unparse(target).endswith("trainer.config")


def test_every_built_in_guard_is_in_the_row_once():
    built_in = {
        node.name
        for path in (ROOT / "verl/trainer/guards").glob("*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base) == "Guard" for base in node.bases)
    }
    assert built_in == {guard.__name__ for guard in GUARDS} and len(set(GUARDS)) == len(GUARDS)


@pytest.mark.fast("True")
@pytest.mark.parametrize("failed", [True, False])
def test_a_run_that_stops_for_a_fault_says_so_and_the_command_fails(failed, settings, caplog):
    caplog.set_level("INFO")
    trainer = trainer_with(settings, Script({("after_step", 2): STOP("loss is NaN", failed=failed)}))
    assert launch.fit(trainer) == int(failed)
    (record,) = [record for record in caplog.records if "loss is NaN" in record.getMessage()]
    assert record.levelname == ("ERROR" if failed else "INFO")
    assert record.getMessage() == "stopped at step 2 of 4: loss is NaN"


def test_a_mismatch_is_one_message_and_a_failure(settings, capsys):
    trainer = trainer_with(settings, Script(), "actor_rollout_ref.rollout.max_mismatch=1e-12")
    assert launch.fit(trainer) == 1
    error = capsys.readouterr().err
    assert "Traceback" not in error and "rollout/logprob_gap_mean is" in error and "in step 1 of 4" in error
