"""The code of README.md and of docs/quickstart.md runs as printed."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pages import blocks, commands

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def block(word: str) -> str:
    (found,) = [b for b in BLOCKS if word in b]
    return found


@pytest.fixture
def settings(tmp_path):
    from tests.trainer.conftest import make_tiny, run_settings

    return run_settings(make_tiny(tmp_path), tmp_path / "run")


def test_the_estimator_of_the_readme_trains(settings, tmp_path):
    from verl.trainer.local_trainer import LocalPPOTrainer

    mine = tmp_path / "my_ideas.py"
    mine.write_text(block("best_of_group"))
    plugin = [f"imports=[{mine}]", "algorithm.adv_estimator=best_of_group", "trainer.total_training_steps=1"]
    metrics = LocalPPOTrainer(overrides=[*settings, *plugin]).fit()
    assert metrics["critic/advantages/max"] == 1


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
def test_the_task_of_the_readme(shell, capsys):
    """Its files, the scores that it gives, and the plan of the run, with a tiny model."""
    page = "../README.md"
    listed = [command for command in commands(page) if not command.startswith("make ")]
    (train,) = [block.replace("\\\n", " ").strip() for block in blocks(page, "console")]
    for command in listed:
        shell.run(command)
    shell.run("python examples/quickstart/make_tiny_model.py --like qwen2 --out tiny")
    shell.run(train.replace("Qwen/Qwen2.5-0.5B-Instruct", "tiny"))
    printed = capsys.readouterr().out
    assert "bad rows: 0 of 2" in printed and "would train 20 steps of grpo from tiny" in printed


def test_every_subcommand_of_the_readme_is_there():
    from typer.testing import CliRunner

    from verl.cli.app import app

    listed = CliRunner().invoke(app, ["--help"]).output.partition("Commands:")[2]
    known = {line.split()[0] for line in listed.splitlines() if line.strip()}
    commands = "\n".join(re.findall(r"```bash\n(.*?)```", README, re.DOTALL))
    named = set(re.findall(r"`verl ([a-z][a-z-]*)", README))
    named |= set(re.findall(r"^verl (\w[a-z-]*)", commands, re.MULTILINE))
    assert {"train", "config", "report"} <= named
    assert named <= known


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_commands_without_network_train_as_printed(tmp_path):
    """No hub and no cache; the accuracy on held-out sums rises as the page says: by more than 0.2."""
    (script,) = [b for b in blocks("quickstart.md", "bash") if "data_preprocess/sums.py" in b]
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    bin_folder = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = os.environ | {"PATH": bin_folder, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run(["bash", "-e", "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    before, after = re.search(
        r"validation sums/acc/mean@1: ([\d.]+) \(step 0\) -> ([\d.]+) \(step 100\)", done.stdout
    ).groups()
    assert float(after) > float(before) + 0.2
    rows = {path.stem: path.read_text().splitlines() for path in (tmp_path / "data" / "sums").glob("*.jsonl")}
    assert {name: len(lines) for name, lines in rows.items()} == {"sft": 320, "train": 320, "test": 80}
    prompts = {name: {json.loads(line)["prompt"] for line in lines} for name, lines in rows.items()}
    assert prompts["sft"] == prompts["train"] and not prompts["train"] & prompts["test"]
