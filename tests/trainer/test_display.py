"""What is printed of a run: steps, operators on request, warnings, and a summary, also of an interrupted run."""

import json
import logging
from pathlib import Path

import pytest

from verl.config import Config
from verl.config.schema.sft import SFTConfig
from verl.trainer.local_trainer import LocalPPOTrainer
from verl.trainer.output.run_log import next_lines, serve_command
from verl.trainer.ppo_trainer import PPOTrainer
from verl.trainer.sft import SFTTrainer


@pytest.fixture
def lines(monkeypatch):
    """What a run prints, without the times."""
    heard, logger = [], logging.getLogger("verl")
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    monkeypatch.setenv("COLUMNS", "80")
    yield heard
    logger.removeHandler(handler)
    logger.setLevel(level)


def console(settings, run, *more):
    others = [text for text in settings if not text.startswith(("trainer.logger=", "trainer.default_local_dir="))]
    return [*others, "trainer.logger=[console,jsonl]", f"trainer.default_local_dir={run}", *more]


def test_one_line_per_step_and_a_summary_with_paths_and_the_next_command(settings, tmp_path, lines, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = console(settings, "run", "trainer.total_training_steps=2", "trainer.test_freq=1", "trainer.save_freq=2")
    PPOTrainer(overrides=given).fit()
    steps = [line for line in lines if line.startswith("step ")]
    assert [line[:8] for line in steps] == ["step 1/2", "step 1 v", "step 2/2", "step 2 v"]
    assert all(len(line) <= 80 for line in steps)
    assert not any(line.startswith(("[gen]", "[validate]")) for line in lines)
    end = lines[next(i for i, line in enumerate(lines) if line.startswith("reward ")) :]
    assert end[0].split(" in ")[1].startswith("2 steps (")
    assert end[1].startswith("validation ") and "(step 1) -> " in end[1]
    model = "run/global_step_2/actor/huggingface"
    assert end[2] == f"model:   {model}" and (tmp_path / model).is_dir()
    assert end[3].startswith("metrics: run/metrics.jsonl")
    assert end[4:6] == [f"next:    verl serve {model}", "         verl report run"]


@pytest.mark.slow
def test_the_summary_of_a_resumed_run_covers_all_of_its_steps(settings, tmp_path, lines, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for total in (2, 4):
        given = [f"trainer.total_training_steps={total}", "trainer.test_freq=2", "trainer.save_freq=2"]
        PPOTrainer(overrides=console(settings, "run", *given)).fit()
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    rewards = [record["critic/score/mean"] for record in records if "critic/score/mean" in record]
    assert len(rewards) == 4
    first, last = sum(rewards[:2]) / 2, sum(rewards[2:]) / 2
    (_, line) = [line for line in lines if line.startswith("reward ")]
    assert line.startswith(f"reward {first:.2f} -> {last:.2f} in 4 steps (") and " since step 2; means of " in line
    (_, line) = [line for line in lines if line.startswith("validation ")]
    assert "(step 2) -> " in line and "(step 4)" in line


def test_the_next_command_serves_the_model():
    for config, section in ((Config(), "actor_rollout_ref.model"), (SFTConfig(), "model")):
        assert serve_command(config, Path("my model")) == ["verl serve 'my model'"]
        more = config.with_overrides({f"{section}.trust_remote_code": True, "imports": ["a.py", "b"]})
        assert serve_command(more, Path("m")) == ["verl serve m --trust-remote-code --imports a.py --imports b"]
        templated = config.with_overrides({f"{section}.custom_chat_template": "{{ messages[0].content }}"})
        assert serve_command(templated, Path("m")) == []
    assert next_lines(["verl report run"]) == ["next:    verl report run"]


def test_an_interrupted_run_has_a_summary_and_a_failed_one_has_not(settings, tmp_path, lines):
    class Stopping(PPOTrainer):
        error: type[BaseException] = KeyboardInterrupt

        def step(self):
            if self.global_step == 1:
                raise self.error
            return super().step()

    given = console(settings, tmp_path / "run", "trainer.total_training_steps=5")
    with pytest.raises(KeyboardInterrupt):
        Stopping(overrides=given).fit()
    assert any(line.startswith("reward ") and " in 1 of 5 steps" in line for line in lines)
    lines.clear()
    Stopping.error = ZeroDivisionError
    with pytest.raises(ZeroDivisionError):
        Stopping(overrides=console(settings, tmp_path / "other", "trainer.total_training_steps=5")).fit()
    assert not any(line.startswith("reward ") for line in lines)


def test_operators_are_logged_by_the_local_trainer_and_on_request(settings):
    assert LocalPPOTrainer(overrides=settings).pipeline.log_level == logging.INFO
    for trainer_class, given, level in (
        (PPOTrainer, "null", logging.DEBUG),
        (PPOTrainer, "true", logging.INFO),
        (LocalPPOTrainer, "false", logging.DEBUG),
    ):
        trainer = trainer_class(overrides=[*settings, f"trainer.log_operators={given}"])
        assert trainer.pipeline.log_level == trainer.validation.log_level == level


def test_a_quiet_run_prints_steps_and_warnings_only(settings, tmp_path, lines):
    given = console(settings, tmp_path / "run", "trainer.total_training_steps=1", "trainer.log_level=warning")
    PPOTrainer(overrides=given).fit()
    shown = [line.split()[0] for line in lines if not line.startswith("the trained model will not be saved")]
    assert shown == ["step", "reward", "metrics:", "next:"]


@pytest.mark.slow
def test_divergence_is_a_warning_without_the_console_too(settings, lines, monkeypatch):
    trainer = PPOTrainer(overrides=[*settings, "trainer.total_training_steps=5"])
    seen = trainer.step_metrics
    monkeypatch.setattr(trainer, "step_metrics", lambda batch: seen(batch) | {"actor/ref_kl": 3.0})
    trainer.fit()
    (line,) = [line for line in lines if "far from the reference" in line]
    assert line.startswith("step 5: ") and "KL 3 (step 1) -> 3 (step 5), median of 5 steps 3 nats" in line


def test_sft(tiny, tmp_path, lines):
    given = [f"model.path={tiny / 'model'}", f"data.train_files={tiny / 'train.jsonl'}", "data.train_batch_size=8"]
    given += ["data.max_length=16", "trainer.total_training_steps=2", f"trainer.default_local_dir={tmp_path / 'run'}"]
    SFTTrainer(overrides=[*given, "data.prompt_key=prompt", "data.response_key=answer"]).fit()
    assert [line.split()[2] for line in lines if line.startswith("step ")] == ["loss", "loss"]
    assert any(line.startswith("loss ") and "in 2 steps" in line for line in lines)
