"""Secrets and control characters are in no output: settings, logs, errors, configurations, records, tracebacks."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from verl.config import dump_config, load_config, to_flat_dict
from verl.config.errors import ConfigError
from verl.tracking.run_record import RunRecord
from verl.trainer.main_ppo import main
from verl.trainer.state.identity import Identity
from verl.utils import redaction
from verl.utils.redaction import (
    is_secret_name,
    printable,
    redact,
    redact_text,
    redact_urls,
    redacted,
    remember_arguments,
)

SECRETS = ["HF_TOKEN", "WANDB_API_KEY", "api_key", "apiKey", "dbPassword", "client_secret_v2", "AWS_SECRET_ACCESS_KEY"]
SECRETS += ["SSH_KEY", "auth_token", "judge-token", "Authorization", "redis_password", "OPENAI_API_KEY_2", "passphrase"]
PLAIN = ["prompt_key", "image_key", "eos_token", "pad_token", "max_tokens", "tokenizer", "keyboard", "author", "monkey"]
PLAIN += ["stop_token", "num_special_tokens", "authority", "secretary", "tokens_per_second", "key", "reward_fn_key"]
PLAIN += ["PWD", "OLDPWD", "SSH_AUTH_SOCK", "RAY_AUTH_MODE", "token_file", "XAUTHORITY", "TOKENIZERS_PARALLELISM"]
PLAIN += ["think_token", "vision_start_token", "assistant_token", "token_budget", "token_level", "token_type_ids"]


@pytest.mark.parametrize("name", [*SECRETS, *PLAIN])
def test_names_of_secrets(name):
    assert is_secret_name(name) == (name in SECRETS)


def test_settings_at_any_depth():
    found = redact(
        {"a": [{"api_key": "hidden-1", "n": 3}], "worker_env": {"X": "hidden-2"}, "max_tokens": 5, "t": None}
    )
    assert "hidden" not in str(found)
    assert found["a"][0]["n"] == 3 and found["max_tokens"] == 5 and list(found["worker_env"]) == ["X"]


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://me:hunter22@host/x?a=1", "https://<not saved>@host/x?a=1"),
        ("see s3://AKIA0123456789abcdef@bucket/x", "see s3://<not saved>@bucket/x"),
        ("https://host/x?token=abc&b=2&X-Amz-Signature=0f", "https://host/x?token=<not saved>&b=2&X-Amz-Signature=0f"),
        ("https://host/x?api_key=abc#end", "https://host/x?api_key=<not saved>#end"),
        ("looked at /data/https:/me:hunter22@host/x", "looked at /data/https:/<not saved>@host/x"),
        ("git@github.com:a/b and a@b.c", "git@github.com:a/b and a@b.c"),
        ("http://host:8000/v1@2", "http://host:8000/v1@2"),
    ],
)
def test_credentials_in_urls(url, expected):
    assert redact_urls(url) == expected


def test_values_of_the_environment_and_of_a_command_line(monkeypatch):
    monkeypatch.setenv("MY_SERVICE_TOKEN", "abcdef-123")
    remember_arguments(["trainer.worker_env.PLAIN=from-the-command", "+reward.reward_kwargs.judge_token='quoted-1'"])
    assert redact_text("abcdef-123 from-the-command quoted-1") == "<not saved> <not saved> <not saved>"


def test_the_environment_is_read_again_only_if_it_has_changed(monkeypatch):
    judged = []
    monkeypatch.setattr(redaction, "is_secret_name", lambda name: judged.append(name) or is_secret_name(name))
    monkeypatch.setenv("MY_SERVICE_TOKEN", "abcdef-123")
    assert redact_text("abcdef-123 later-1234") == "<not saved> later-1234" and "MY_SERVICE_TOKEN" in judged
    judged.clear()
    assert redact_text("abcdef-123 later-1234") == "<not saved> later-1234" and not judged
    monkeypatch.setenv("MY_SERVICE_TOKEN", "later-1234")
    assert redact_text("abcdef-123 later-1234") == "abcdef-123 <not saved>"
    os.environb[b"MY_SERVICE_TOKEN"] = b"later-5678"
    assert redact_text("later-1234 later-5678") == "later-1234 <not saved>"
    monkeypatch.delenv("MY_SERVICE_TOKEN")
    assert redact_text("later-5678") == "later-5678"
    monkeypatch.setattr(os, "environ", {"MY_SERVICE_TOKEN": "abcdef-123"})
    assert redact_text("abcdef-123") == "<not saved>"


def test_folders_in_the_environment_of_workers_stay_in_messages(tmp_path):
    key = f"value-{tmp_path.name}-of-a-key"
    remember_arguments([f"trainer.worker_env.HF_HOME={tmp_path}", f"trainer.worker_env.CUSTOM={key}"])
    remember_arguments([f"trainer.worker_env.HF_TOKEN={tmp_path / 'no-folder'}"])
    assert redact_text(f"the newest checkpoint is {tmp_path}/run") == f"the newest checkpoint is {tmp_path}/run"
    assert redact_text(f"{key} {tmp_path / 'no-folder'}") == "<not saved> <not saved>"


def test_control_characters():
    assert printable("a\x1b]0;title\x07\u202eb\nc\t") == "a\\x1b]0;title\\x07\\u202eb\nc\t"


def test_a_saved_configuration_has_no_credentials_and_says_so_when_it_is_used(tmp_path):
    settings = ["data.train_files=[https://me:hunter22@host/x.parquet]", "ray_kwargs.ray_init._redis_password=hunter33"]
    text = dump_config(load_config(None, settings), redact=True)
    assert "hunter" not in text and text.count("<not saved>") == 2
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(str(tmp_path / "config.yaml"))
    assert [p.key for p in caught.value.problems if "was not saved" in p.message] == [
        "data.train_files",
        "ray_kwargs.ray_init._redis_password",
    ]


def test_what_a_command_prints(capsys):
    settings = ["trainer.worker_env.X=hunter-44", "reward.reward_kwargs.judge_api_key=hunter-55"]
    assert main([*settings, "--print-config"]) == 0
    assert main([*settings, "trainer.worker_env.Y={a: hunter-44}", "trainer.seed=\x1b]0;hunter-55\x07"]) == 1
    out, err = capsys.readouterr()
    assert "hunter" not in out + err and "\x1b" not in err and "trainer.seed" in err


def test_logs_and_tracebacks_of_a_process():
    code = (
        "import logging, sys\n"
        "from verl.trainer.startup.program import Program\n"
        "from verl.utils.log import setup_logging\n"
        "setup_logging()\n"
        "class Command(Program):\n"
        "    def read(self, path, overrides):\n"
        "        logging.getLogger('verl.x').warning('it is hunter-66 \\x1b[2J')\n"
        "        raise RuntimeError('no access with hunter-66 \\x1b[2J')\n"
        "Command('a.b', '', 'Config', '').main(['a=b'])\n"
    )
    env = os.environ | {"SERVICE_PASSWORD": "hunter-66", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=200)
    assert (
        done.returncode == 1
        and "hunter-66" not in done.stdout + done.stderr
        and "\x1b" not in done.stdout + done.stderr
    )
    assert "it is <not saved> \\x1b[2J" in done.stdout
    assert "RuntimeError: no access with <not saved> \\x1b[2J" in done.stderr and "Traceback" in done.stderr


def test_the_record_of_a_run(tmp_path, monkeypatch):
    monkeypatch.setenv("SERVICE_PASSWORD", "hunter-77")
    with pytest.raises(RuntimeError), RunRecord(tmp_path, {}):
        logging.getLogger("verl.x").warning("a warning with hunter-77")
        raise RuntimeError("an error with hunter-77")
    assert json.loads((tmp_path / "run.json").read_text())["error"] == "RuntimeError: an error with <not saved>"
    assert json.loads((tmp_path / "warnings.jsonl").read_text())["message"] == "a warning with <not saved>"


# ---- values that settings read from the environment -----------------------------------------------------------------

ROOT = Path(__file__).parents[2]
CLEAR = "S3CR3T-v4lue"
EXPRESSION = "${oc.env:MY_SETTING}"
FREE = "reward.custom_reward_function.reward_kwargs"


@pytest.fixture
def setting(monkeypatch):
    monkeypatch.setattr(redaction, "_expressions", {})
    monkeypatch.delenv("VERL_INTERPOLATED_VARIABLES", raising=False)
    monkeypatch.setenv("MY_SETTING", CLEAR)
    monkeypatch.setenv("SHORT", "s3cr3t")


@pytest.mark.parametrize(
    "override",
    [
        f"trainer.project_name={EXPRESSION}",
        f"trainer.project_name=a-{EXPRESSION}-b",
        f"+{FREE}.base='{EXPRESSION}'",
        f"+{FREE}.api_key='{EXPRESSION}'",
        f"+{FREE}.url='https://host/{EXPRESSION}/x'",
        f"{FREE}={{deep: {{list: ['{EXPRESSION}', x]}}}}",
        "trainer.project_name=${oc.env:SHORT}",
        f"+{FREE}.pin='${{oc.env:SHORT}}'",
        "trainer.project_name=${oc.env:${oc.env:NAME_OF_IT}}",
        f"trainer.worker_env.X='{EXPRESSION}'",
    ],
)
def test_a_value_of_the_environment_is_saved_as_its_expression(setting, monkeypatch, override):
    monkeypatch.setenv("NAME_OF_IT", "MY_SETTING")
    config = load_config(None, [override])
    text = dump_config(config, redact=True)
    assert CLEAR not in text and "s3cr3t" not in text and "oc.env" in text
    assert load_config(yaml.safe_load(text)) == config
    if "SHORT" not in override:  # it would also be found in other words
        assert redact_text(f"failed with {CLEAR}") == f"failed with {EXPRESSION}"


def test_a_process_that_is_started_later_knows_the_values(setting):
    load_config(None, [f"trainer.project_name={EXPRESSION}"])
    code = f"from verl.utils.redaction import redact_text; print(redact_text('it is {CLEAR}'))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"it is {EXPRESSION}"


def test_folders_and_numbers_of_the_environment_are_saved_as_they_are(setting, monkeypatch, tmp_path):
    monkeypatch.setenv("FOLDER", str(tmp_path / "new"))
    monkeypatch.setenv("STEPS", "12345678")
    overrides = ["trainer.default_local_dir=${oc.env:FOLDER}/x", "trainer.total_training_steps=${oc.env:STEPS}"]
    text = dump_config(load_config(None, overrides), redact=True)
    assert str(tmp_path / "new" / "x") in text and "12345678" in text


def test_a_changed_value_is_another_experiment(setting, monkeypatch, tmp_path):
    def identity(*overrides: str) -> tuple[Identity, dict]:
        config = load_config(None, overrides)
        return Identity(config, tmp_path), redacted(to_flat_dict(config))

    overrides = [f"+{FREE}.base='{EXPRESSION}'", f"+{FREE}.api_key='{EXPRESSION}'"]
    first, saved_config = identity(*overrides)
    saved = first.state()
    assert CLEAR not in json.dumps([saved, saved_config])
    identity(*overrides)[0].check(saved, saved_config, tmp_path)
    identity(f"+{FREE}.base={CLEAR}", overrides[1])[0].check(saved, saved_config, tmp_path)  # the same value
    monkeypatch.setenv("MY_SETTING", "an0ther-value")
    with pytest.raises(ValueError, match=f"{FREE}: .*has another value") as caught:
        identity(*overrides)[0].check(saved, saved_config, tmp_path)
    assert "an0ther" not in str(caught.value)
    saved = {**saved, "variables": {}}
    monkeypatch.setenv("MY_SETTING", CLEAR)
    key_only, config_of_key = identity(overrides[1])
    monkeypatch.setenv("MY_SETTING", "an0ther-value")  # a key of a service may change
    identity(overrides[1])[0].check(key_only.state(), config_of_key, tmp_path)
