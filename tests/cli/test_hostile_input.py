"""Every command with files that cannot be read and numbers out of range: one message, no traceback, no wait."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from verl.cli.app import app
from verl.utils.paths import expanded, read_json, read_text, resolved, write_text

KINDS = ("folder", "pipe", "dangling link", "loop", "not UTF-8", "binary", "empty", "long name", "below a file", "~")


def hostile(folder: Path, kind: str, suffix: str) -> Path:
    """A path that no command can use as a file with content."""
    path = folder / f"given{suffix}"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind in ("dangling link", "loop"):
        path.symlink_to(path.name if kind == "loop" else "nothing")
    elif kind == "long name":
        return folder / ("x" * 300 + suffix)
    elif kind == "below a file":
        (folder / "file").write_text("")
        return folder / "file" / path.name
    elif kind == "~":
        return Path(f"~no-such-user/given{suffix}")
    else:
        path.write_bytes({"not UTF-8": b"a: \xff\xfe", "binary": b"PAR1\x00\x01\xf5PAR1", "empty": b""}[kind])
    return path


def status_of(*arguments: str) -> tuple[int, str]:
    """(exit status, output) of a command; an error of the test if it waits or raises anything but SystemExit."""

    def waits(*_: object) -> None:
        raise AssertionError(f"waits: {' '.join(arguments)}")

    before = signal.signal(signal.SIGALRM, waits)
    signal.alarm(200)  # opening a pipe waits forever
    try:
        found = CliRunner().invoke(app, list(arguments))
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert found.exception is None or isinstance(found.exception, SystemExit), found.exception
    return found.exit_code, found.output


EVALUATION = "eval data.path=FILE reward.reward_function=accuracy_reward"
#: suffix of FILE -> arguments
READERS = {".csv": [EVALUATION], ".sh": ["config convert FILE"]}
READERS[".py"] = ["train imports=[FILE] --dry-run", "serve . --port 0 --imports FILE"]
READERS[".parquet"] = ["train data.train_files=FILE --dry-run", EVALUATION]
READERS[".jsonl"] = ["generate model.path=FILE data.path=FILE --dry-run", EVALUATION]
READERS[".yaml"] = ["train --config FILE --dry-run", "sft --config FILE --dry-run", "eval --config FILE --dry-run"]
READERS[".yaml"] += ["generate --config FILE --dry-run", "plan FILE"]
READERS[".yaml"] += ["config diff FILE defaults", "config convert FILE"]
READERS[""] = [
    "train --config-path FILE --config-name x --dry-run",
    "plan --gpus 8 --model FILE",
    "quickstart --model FILE",
]
READERS[""] += ["train actor_rollout_ref.model.path=FILE --dry-run", "runs list FILE", "runs compare FILE FILE"]
READERS[""] += ["merge --backend fsdp --local_dir FILE --target_dir target", "serve FILE --port 0", "report FILE"]
READERS[""] += ["merge test --backend megatron --local_dir FILE --test_hf_dir FILE"]


def cases() -> Iterator[Any]:
    """(command, suffix, kind): the first command of each suffix with all kinds, the others with what waits or loops."""
    for suffix, commands in READERS.items():
        for number, command in enumerate(commands):
            for kind in KINDS:
                is_fast = number == 0 or kind in ("pipe", "loop")
                yield pytest.param(command, suffix, kind, marks=() if is_fast else pytest.mark.slow)


@pytest.mark.parametrize(("command", "suffix", "kind"), cases())
def test_a_file_that_cannot_be_read(command, suffix, kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = hostile(tmp_path, kind, suffix)
    status, text = status_of(*(word.replace("FILE", str(path)) for word in command.split()))
    assert "Traceback" not in text and "Errno" not in text
    if command.startswith("config diff") and kind == "empty":
        assert status == 0 and "are equal" in text
        return
    assert status in (1, 2) and text.strip()


@pytest.mark.parametrize("number", ["-1", "0", "nan", "1e400", "9" * 400, "abc", "", "²"])
@pytest.mark.parametrize(
    "command",
    [
        "plan --gpus N",
        "quickstart --steps N",
        "quickstart --model . --test-rows N",
        *(
            f"serve /no/model --{name} N"
            for name in ("max-model-len", "tensor-parallel-size", "gpu-memory-utilization")
        ),
        "merge --backend fsdp --local_dir x --target_dir y --max_shard_size N",
        "config convert x.yaml --gpus N",
        "train trainer.total_training_steps=N --dry-run",
        "train trainer.seed=N --dry-run",
    ],
)
def test_a_number_out_of_range(command, number, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, text = status_of(*(word.replace("N", number) if word != "--N" else word for word in command.split()))
    assert status in (1, 2) and text.strip() and "Traceback" not in text and "invalid literal" not in text
    if command.startswith("train trainer.seed"):
        assert ("trainer.seed" in text) == (number != "0")


@pytest.mark.parametrize(
    "given", [["serve", ".", "--port", "99999"], ["runs", "list", "--limit", "-1"], ["check", "-1"]]
)
def test_an_option_out_of_range_is_an_error_of_usage(given):
    assert status_of(*given)[0] == 2


def test_an_empty_chat_template_is_an_error(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "empty.jinja").write_text("\n")
    status, text = status_of("serve", str(tmp_path), "--port", "0", "--chat-template", str(tmp_path / "empty.jinja"))
    assert status == 1 and "empty.jinja: expected a Jinja chat template, found an empty file" in text.replace("\n", "")


def test_paths_of_users(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "loop").symlink_to("loop")
    assert expanded("~/a") == tmp_path / "a" and expanded("~no-such-user/a") == Path("~no-such-user/a")
    assert resolved("~/loop") == tmp_path.resolve() / "loop"
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="No such device"):
        write_text(tmp_path / "pipe", "x")
    with pytest.raises(ValueError, match="expected a file, found something else"):
        read_text(tmp_path / "pipe")
    write_text(tmp_path / "a.json", '{"é": ')
    assert read_text(tmp_path / "a.json") == '{"é": '
    with pytest.raises(ValueError, match=r"a\.json: expected JSON: "):
        read_json(tmp_path / "a.json")
