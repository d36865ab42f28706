"""Published snippets run unchanged: the flow in ten lines, the local trainer, the YAML command line."""

import importlib.util
import json
import logging
import re
from pathlib import Path

import pytest

import verl
from tests.programs import run_python
from verl.trainer.local_trainer import LocalPPOTrainer

ROOT = Path(__file__).resolve().parents[2]

LOCAL_CONFIG = """
trainer:
  project_name: my_project
  experiment_name: local_ppo
  n_gpus_per_node: 1
  total_epochs: 1
  save_freq: 6

actor_rollout:
  model_name_or_path: ./model
  use_vllm: false

critic:
  model_name_or_path: ./model

data:
  train_files: ["./train.jsonl"]
  max_prompt_length: 512
"""

# As printed; only the sizes are given beside the file, and the reward, since these rows are nobody's data set.
LOCAL_SCRIPT = """
from transformers import AutoTokenizer

from verl.data.rlhf_dataset import RLHFDataset
from verl.trainer.local_trainer import LocalPPOTrainer

tokenizer = AutoTokenizer.from_pretrained("./model")
train_dataset = RLHFDataset(data_files=["train.jsonl"], tokenizer=tokenizer, config={"max_prompt_length": 512})


def look(batch):
    print(sorted(batch.batch.keys()))


class LookingTrainer(LocalPPOTrainer):
    def build_flow(self):
        return super().build_flow().insert_after("adv", look)


few = ["data.train_batch_size=4", "data.max_response_length=6", "reward_function=accuracy_reward"]
LookingTrainer(
    config_path="./config.yaml", train_dataset=train_dataset, overrides=[*few, "use_reference_policy=true"]
).fit()
"""

CLI_CONFIG = """
algorithm:
  name: ppo
  clip_range: 0.2
  value_loss_coef: 0.5

model:
  pretrain_model_path: ./model

reward_function: {reward}

data:
  train_path: train.jsonl
  batch_size_per_gpu: 12

engine:
  actor_type: fsdp
  critic_type: fsdp
  num_gpus: 1
"""


@pytest.fixture
def workplace(tiny, tmp_path):
    """A folder with ./model and train.jsonl (24 rows of prompt and answer), as the snippets expect."""
    (tmp_path / "model").symlink_to(tiny / "model")
    (tmp_path / "train.jsonl").symlink_to(tiny / "train.jsonl")
    return tmp_path


def run(folder: Path, *command: str) -> str:
    done = run_python(*command, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def phases(shown: str) -> list[str]:
    """The names in the lines `12:03:44 [gen] 1.24s`, in their order."""
    return re.findall(r"^\d\d:\d\d:\d\d \[(\w+)\] \d+\.\d\ds", shown, re.MULTILINE)


@pytest.mark.slow
def test_the_local_trainer_in_a_plain_script(workplace):
    rows = (workplace / "train.jsonl").read_text().splitlines(keepends=True)
    (workplace / "train.jsonl").unlink()
    (workplace / "train.jsonl").write_text("".join(rows[:8]))
    (workplace / "config.yaml").write_text(LOCAL_CONFIG)
    (workplace / "main.py").write_text(LOCAL_SCRIPT)
    shown = run(workplace, "main.py")
    step = ["prompts", "repeat", "gen", "sleep_rollout", "reward", "old_log_prob", "ref", "values", "adv", "look"]
    assert phases(shown) == [*step, "update_critic", "update_actor", "sync_weights"] * 2 + ["save"]
    assert shown.count("'advantages', 'attention_mask', 'entropys'") == 2  # what batch.batch.keys() holds by then
    assert "8 prompts: 2 steps of 4 per epoch" in shown
    saved = workplace / "checkpoints" / "my_project" / "local_ppo" / "global_step_2"
    assert (saved / "actor").is_dir() and (saved / "critic").is_dir()


def test_a_program_with_its_own_logging_keeps_it(settings):
    log, heard = logging.getLogger("verl"), []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())
    before, level = list(log.handlers), log.level
    log.addHandler(handler)
    log.setLevel(logging.WARNING)
    try:
        LocalPPOTrainer(overrides=[*settings, "trainer.total_training_steps=1"]).fit()
        assert log.handlers == [*before, handler] and log.level == logging.WARNING
        assert not any(line.startswith("[gen]") for line in heard)
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def test_the_command_line_of_a_yaml_file(workplace):
    (workplace / "ppo_config.yaml").write_text(CLI_CONFIG.format(reward="accuracy_reward"))
    few = ["data.max_response_length=6", "trainer.total_epochs=1", "trainer.log_operators=true"]
    shown = run(workplace, "-m", "verl.cli.train", "--config", "ppo_config.yaml", *few)
    assert "12 prompts x 1 sample = 12 responses per step" in shown
    expected = ["prompts", "repeat", "gen", "sleep_rollout", "reward", "old_log_prob", "ref", "values", "kl", "adv"]
    step = [*expected, "update_critic", "update_actor", "sync_weights"]
    assert phases(shown) == [*step, *step, "save"]  # the snippet sets no save_freq: the model is saved at the end
    (actor,) = workplace.glob("checkpoints/*/*/global_step_2/actor/huggingface")
    assert (actor / "model.safetensors").is_file()
    lines = next(workplace.rglob("metrics.jsonl")).read_text().splitlines()
    assert [json.loads(line)["reward/acc"] for line in lines] == [0.0, 0.0]  # a random model


SNIPPETS_WITH_VLLM = {
    "ppo_config.yaml": CLI_CONFIG.format(reward="accuracy_reward").replace("actor_type: fsdp", "actor_type: vllm"),
    "config.yaml": LOCAL_CONFIG.replace("use_vllm: false", "use_vllm: true"),
}


# without vLLM there is one message: tests/config/test_config_aliases.py
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM")
@pytest.mark.parametrize("name", SNIPPETS_WITH_VLLM)
def test_the_snippets_with_vllm(name, workplace):
    from examples.quickstart.tiny_model import tiny_model

    (workplace / "model").unlink()
    tiny_model("llama", workplace / "model", seed=0, size="small")  # heads that vLLM supports
    (workplace / name).write_text(SNIPPETS_WITH_VLLM[name])
    (workplace / "main.py").write_text(LOCAL_SCRIPT)
    few = ["data.max_response_length=6", "trainer.total_epochs=1", "trainer.log_operators=true"]
    commands = {"ppo_config.yaml": ["-m", "verl.cli.train", "--config", name, *few], "config.yaml": ["main.py"]}
    done = run_python(*commands[name], cwd=workplace)
    assert done.returncode == 0, done.stderr
    lines = next(workplace.rglob("metrics.jsonl")).read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    assert phases(done.stdout).count("sync_weights") == len(steps) == (2 if name == "ppo_config.yaml" else 6)
    for step in steps:
        assert step["weight_sync/bytes"] > 0 and step["rollout/logprob_gap_max"] < 2e-5


def test_check_env_has_its_three_names():
    from verl.utils.env_check import check_env

    assert verl.check_env is check_env
