"""The command line: output and exit status."""

import subprocess
import sys

import pytest

from verl.model_merger.__main__ import main, parser


def test_help_shows_a_whole_command_and_does_not_wait_for_torch():
    program = [sys.executable, "-X", "importtime", "-m", "verl.model_merger", "--help"]
    done = subprocess.run(program, capture_output=True, text=True)
    assert done.returncode == 0
    assert "python -m verl.model_merger merge --backend fsdp" in done.stdout
    assert "argparse" in done.stderr and "torch" not in done.stderr


def test_merge_and_test(made, tmp_path, capsys):
    common = ["--backend", "fsdp", "--local_dir", str(made / "ours" / "actor")]
    assert main(["merge", *common, "--target_dir", str(tmp_path / "merged"), "--max_shard_size", "10KB"]) == 0
    assert len(list((tmp_path / "merged").glob("*.safetensors"))) > 1
    assert main(["test", *common, f"--test-hf-dir={tmp_path / 'merged'}"]) == 0
    assert "contain the same model" in capsys.readouterr().out
    assert main(["test", *common, "--test_hf_dir", str(made / "base")]) == 1
    assert "model.norm.weight differs by up to" in capsys.readouterr().out


def test_a_refusal_is_one_line_and_a_status(made, tmp_path, capsys):
    root = made / "ours"
    status = main(["merge", "--local_dir", str(root), "--target_dir", str(tmp_path / "x"), "--tie-word-embedding"])
    assert status == 1
    assert capsys.readouterr().err == (f"error: {root} is a checkpoint of all roles: give one role, {root / 'actor'}\n")


def test_a_size_that_is_none():
    rest = ["merge", "--backend", "fsdp", "--local_dir", "a", "--target_dir", "b", "--max_shard_size"]
    assert parser().parse_args([*rest, "1.5MB"]).max_shard_size == "1.5MB"
    with pytest.raises(SystemExit):
        parser().parse_args([*rest, "many"])
