"""What is printed of a run: steps, operators on request, warnings, and a summary, also of an interrupted run."""

import json
import logging
import shlex
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from verl.config import Config, load_config
from verl.config.schema.offline import GenerationConfig
from verl.config.schema.sft import SFTConfig
from verl.data.rlhf_dataset import RLHFDataset
from verl.data.sft_dataset import SFTDataset
from verl.trainer.local_trainer import LocalPPOTrainer
from verl.trainer.output.run_log import next_lines, offline_commands
from verl.trainer.ppo_trainer import PPOTrainer
from verl.trainer.sft import SFTTrainer
from verl.utils.device import oversubscription, warn_if_oversubscribed

RESPONSES = Path("run/responses.parquet")


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
    assert end[4].startswith(f"next:    verl generate model.path={model} data.path=")
    responses = "run/responses_global_step_2.parquet"
    assert f" data.output_path={responses} " in end[4] and " rollout.response_length=" in end[4]
    assert end[5].startswith(f"         verl eval data.path={responses}")
    assert end[6] == "         verl report run"


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


def test_the_next_commands_are_complete():
    config = Config().with_overrides(
        {
            "data.val_files": ["my data/test.parquet"],
            "data.max_response_length": 4,
            "data.max_prompt_length": 512,
            "data.apply_chat_template_kwargs": {"enable_thinking": False},
            "reward.custom_reward_function.path": "reward.py",
        }
    )
    generate, evaluate = offline_commands(config, Path("m"), RESPONSES)
    assert generate == (
        "verl generate model.path=m 'data.path=my data/test.parquet' data.output_path=run/responses.parquet "
        "'data.apply_chat_template_kwargs={\"enable_thinking\": false}' rollout.response_length=4 rollout.temperature=0"
    )
    scorer = "reward.custom_reward_function.path=reward.py reward.custom_reward_function.name=compute_score"
    assert evaluate == f"verl eval data.path=run/responses.parquet {scorer}"
    settings = load_config(None, shlex.split(generate)[2:], schema=GenerationConfig)
    assert settings.data.apply_chat_template_kwargs == {"enable_thinking": False}
    assert settings.rollout.temperature == 0  # as at validation
    sampled = {"do_sample": True, "temperature": 0.6, "top_p": 0.9}
    keys = {f"actor_rollout_ref.rollout.val_kwargs.{key}": value for key, value in sampled.items()}
    assert offline_commands(config.with_overrides(keys), Path("m"), RESPONSES)[0].endswith(
        "rollout.response_length=4 rollout.temperature=0.6 rollout.top_p=0.9"
    )
    assert offline_commands(config, Path("m"), RESPONSES, reward_given=True) == [generate]
    assert offline_commands(Config(), Path("m"), RESPONSES) == []  # rows were given in Python
    media = {"image_key": "image", "max_pixels": 1024, "mm_processor_kwargs": {"do_resize": False}}
    seen = config.with_overrides({f"data.{key}": value for key, value in media.items()})
    settings = load_config(
        None, shlex.split(offline_commands(seen, Path("m"), RESPONSES)[0])[2:], schema=GenerationConfig
    )
    assert {key: settings.data[key] for key in media} == media
    registered = config.with_overrides(
        {"reward.custom_reward_function.path": None, "reward.reward_function": "accuracy_reward"}
    )
    assert offline_commands(registered, Path("m"), RESPONSES)[1].endswith("reward.reward_function=accuracy_reward")
    other = config.with_overrides({"data.ground_truth_key": "solution"})  # `verl eval` has no such key
    assert len(offline_commands(other, Path("m"), RESPONSES)) == 1
    chats = SFTConfig().with_overrides({"data.train_files": ["a.jsonl"], "data.val_files": ["b.jsonl"]})
    assert offline_commands(chats, Path("m"), RESPONSES) == []
    assert next_lines(["verl report run"]) == ["next:    verl report run"]


def test_the_next_commands_name_the_columns_that_were_detected(tiny, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny / "model")
    rows, chats = tmp_path / "pairs.jsonl", tmp_path / "chats.jsonl"
    rows.write_text('{"question": "1+1=", "answer": "2"}\n')
    chats.write_text('{"messages": [{"role": "user", "content": "1+1="}], "solution": "2"}\n')

    def commands(config, dataset):
        config = config.with_overrides({"data.train_files": ["t"], "data.val_files": ["a"]})
        return offline_commands(config, Path("m"), RESPONSES, dataset=dataset)

    (generate,) = commands(SFTConfig(), SFTDataset(rows, tokenizer))
    assert generate == (
        "verl generate model.path=m data.path=a data.output_path=run/responses.parquet data.prompt_key=question"
    )
    given = Config().with_overrides({"reward.reward_function": "accuracy_reward"})
    (generate,) = commands(given, RLHFDataset(chats, tokenizer, {"chat_template": "{{ messages[0].content }}"}))
    assert "data.prompt_key=messages" in shlex.split(generate)  # and none of `verl eval`, which has no `solution`
    nested = [{"question": {"text": "1+1="}, "answer": {"text": "2"}}]  # `verl generate` reads whole columns
    dataset = SFTDataset(nested, tokenizer, {"prompt_dict_keys": ["text"], "response_dict_keys": ["text"]})
    assert commands(SFTConfig(), dataset) == []


def test_without_validation_data_a_fine_tuned_model_is_served():
    """Responses to the prompts that it was trained on say little."""
    config = SFTConfig().with_overrides({"data.train_files": ["a.jsonl"], "data.prompt_key": "question"})
    assert offline_commands(config, Path("my model"), RESPONSES) == ["verl serve 'my model'"]
    assert offline_commands(SFTConfig(), Path("m"), RESPONSES) == ["verl serve m"]  # rows were given in Python
    more = config.with_overrides({"model.trust_remote_code": True, "imports": ["a.py", "b"]})
    assert offline_commands(more, Path("m"), RESPONSES) == [
        "verl serve m --trust-remote-code --imports a.py --imports b"
    ]
    templated = config.with_overrides({"model.custom_chat_template": "{{ messages[0].content }}"})
    assert offline_commands(templated, Path("m"), RESPONSES) == []
    (generate,) = offline_commands(config.with_overrides({"data.val_files": ["v.jsonl"]}), Path("m"), RESPONSES)
    assert "data.path=v.jsonl" in generate
    rl = Config().with_overrides({"data.train_files": ["a.jsonl"], "reward.reward_function": "accuracy_reward"})
    assert "data.path=a.jsonl" in offline_commands(rl, Path("m"), RESPONSES)[0]  # its reward can be compared


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


def test_the_hint_about_taken_cores():
    assert oversubscription(threads=2, load=0.4, cores=2) is None
    assert oversubscription(threads=1, load=8.0, cores=2) is None
    assert oversubscription(threads=8, load=20.0, cores=64) is None
    assert oversubscription(threads=64, load=40.0, cores=64) == (
        "CPU oversubscription: load average 40.0 on 64 cores, and torch uses 64 threads, which can make steps many "
        "times slower. Set OMP_NUM_THREADS=24"
    )
    assert oversubscription(threads=2, load=3.0, cores=2).endswith("Set OMP_NUM_THREADS=1")


def test_taken_cores_are_a_warning_of_a_run_on_a_cpu(settings, lines, monkeypatch):
    monkeypatch.setattr("os.getloadavg", lambda: (999.0, 999.0, 999.0))
    monkeypatch.setattr("torch.get_num_threads", lambda: 2)
    warn_if_oversubscribed.cache_clear()  # once per process
    for _ in range(2):
        LocalPPOTrainer(overrides=[*settings, "algorithm.name=grpo", "trainer.device=cpu"])
    assert [line[:35] for line in lines if "oversubscription" in line] == ["CPU oversubscription: load average "]
