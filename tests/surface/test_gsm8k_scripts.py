"""The main job as the example scripts do it: GSM8K, a qwen2 model, validation, steps, a checkpoint, and on from there.

The short form of what the head of each script shows. The questions are the real ones where a copy of them is at hand.
"""

import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from examples.quickstart.tiny_model import tiny_model
from verl.registry import import_module
from verl.trainer.main_ppo import main

ROOT = Path(__file__).resolve().parents[2]
REAL = ROOT.parent / "shared" / "data" / "gsm8k"
SCRIPT = "examples/{}_trainer/run_gsm8k_local.sh"
FLOW = {
    "grpo": ["gen", "sleep_rollout", "reward", "old_log_prob", "ref", "adv", "update_actor", "sync_weights"],
    "ppo": [
        *("gen", "sleep_rollout", "reward", "old_log_prob", "ref", "values", "kl", "adv"),
        *("update_critic", "update_actor", "sync_weights"),
    ],
}
SHORT = ["data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=2", "actor_rollout_ref.rollout.n=2"]
SHORT += ["data.train_max_samples=40", "data.val_max_samples=4", "data.max_response_length=8"]


def run(*command: object, **environment: object) -> str:
    """The output of a command that must succeed, run from the root of the repository."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **{key: str(value) for key, value in environment.items()}},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def own_rows(folder: Path) -> Path:
    """Questions in the form of GSM8K, for a machine without a copy of it."""
    for split, count in (("train", 120), ("test", 20)):
        rows = [
            {"question": f"Ann has {i} pens and buys {i % 7} more. How many?", "answer": f"Add.\n#### {i + i % 7}"}
            for i in range(count)
        ]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> dict[str, Path]:
    """MODEL and DATA of the scripts."""
    folder = tmp_path_factory.mktemp("gsm8k")
    rows = REAL if REAL.is_dir() else own_rows(folder)
    preprocess = import_module(str(ROOT / "examples" / "data_preprocess" / "gsm8k.py"))
    preprocess.main(["--local_dir", str(rows), "--save_dir", str(folder / "data")])
    tiny_model("qwen2", folder / "model", seed=0)  # as make_tiny_model.py --like qwen2
    return {"MODEL": folder / "model", "DATA": folder / "data"}


def arguments_of(script: str, folder: Path, **environment: object) -> list[str]:
    """What a script hands to `python -m verl.trainer.main_ppo`."""
    show = folder / "show"
    show.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    show.chmod(show.stat().st_mode | stat.S_IXUSR)
    module, *arguments = run("bash", script, PYTHON=show, **environment).splitlines()[1:]
    assert module == "verl.trainer.main_ppo"
    return arguments


@pytest.mark.slow
def test_what_the_script_shows(prepared, tmp_path):
    changes = [*SHORT, "trainer.total_training_steps=1", f"trainer.default_local_dir={tmp_path / 'run'}"]
    shown = run("bash", SCRIPT.format("ppo"), *changes, PYTHON=sys.executable, **prepared)
    assert "4 prompts x 2 samples = 8 responses per step; 2 updates of 4 responses" in shown
    phases = re.findall(r"^\d\d:\d\d:\d\d \[(\w+)\] \d+\.\d\ds", shown, re.MULTILINE)
    validation = ["repeat", "gen", "free_rollout_cache", "reward", "validate"]
    assert phases == [*validation, "prompts", "repeat", *FLOW["ppo"], *validation, "save"]
    assert shown.count("val-core/openai/gsm8k/acc/mean@1") == 2


@pytest.mark.fast("grpo")
@pytest.mark.parametrize("algorithm", FLOW)
def test_script_trains_validates_saves_and_resumes(algorithm, prepared, tmp_path):
    # in this process, which has imported everything already
    folder = tmp_path / "run"
    arguments = arguments_of(SCRIPT.format(algorithm), tmp_path, **prepared)
    arguments += [*SHORT, f"trainer.default_local_dir={folder}"]
    assert main([*arguments, "trainer.total_training_steps=1"]) == 0
    assert (folder / "latest_checkpointed_iteration.txt").read_text().strip() == "1"
    assert main([*arguments, "trainer.total_training_steps=2"]) == 0
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if "actor/pg_loss" in line]
    assert [line["step"] for line in trained] == [1, 2]
    assert trained[0].keys() >= {f"timing_s/{name}" for name in FLOW[algorithm]}
    assert [line["step"] for line in lines if "val-core/openai/gsm8k/acc/mean@1" in line] == [0, 1, 2]
    saved = folder / "global_step_2"
    assert (saved / "actor" / "huggingface" / "model.safetensors").is_file()
    assert (saved / "critic").is_dir() == (algorithm == "ppo")
