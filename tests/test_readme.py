"""The code of the README runs as printed."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs import run_python

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def block(word: str) -> str:
    (found,) = [b for b in BLOCKS if word in b]
    return found


def test_the_flow_of_the_readme_runs():
    done = run_python("-c", block("flow.compile()"), cwd=ROOT)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 3
    assert all("x" in line and "y" in line for line in lines)


@pytest.fixture
def settings(tmp_path):
    from tests.trainer.conftest import make_tiny, run_settings

    return run_settings(make_tiny(tmp_path), tmp_path / "run")


def test_the_estimator_the_loss_and_the_reward_of_the_readme_train(settings, tmp_path):
    from verl.trainer.local_trainer import LocalPPOTrainer

    mine, reward = tmp_path / "my_ideas.py", tmp_path / "my_reward.py"
    mine.write_text(block("best_of_group") + "\n" + block('register_policy_loss("plain")'))
    reward.write_text(block("def compute_score"))
    chosen = [s for s in settings if not s.startswith("reward.custom_reward_function")]
    metrics = LocalPPOTrainer(
        overrides=[
            *chosen,
            f"imports=[{mine}]",
            "algorithm.adv_estimator=best_of_group",
            "actor_rollout_ref.actor.policy_loss.loss_mode=plain",
            f"reward.custom_reward_function.path={reward}",
            "trainer.total_training_steps=1",
        ]
    ).fit()
    assert metrics["actor/ratio"] == pytest.approx(1, abs=0.2)


def test_the_operator_of_the_readme_is_in_the_flow(settings):
    names: dict = {}
    exec(block("class MyTrainer"), names)
    trainer = names["MyTrainer"](overrides=[*settings, "algorithm.name=grpo", "trainer.total_training_steps=1"])
    order = [op.name for op in trainer.pipeline.operators]
    assert order.index("clip") == order.index("adv") - 1
    assert trainer.fit()["timing_s/clip"] >= 0


def test_every_subcommand_of_the_readme_is_there():
    from typer.testing import CliRunner

    from verl.cli.app import app

    listed = CliRunner().invoke(app, ["--help"]).output.partition("Commands:")[2]
    known = {line.split()[0] for line in listed.splitlines() if line.strip()}
    commands = "\n".join(re.findall(r"```bash\n(.*?)```", README, re.DOTALL))
    named = set(re.findall(r"`verl ([a-z][a-z-]*)", README))
    named |= set(re.findall(r"^verl (\w[a-z-]*)", commands, re.MULTILINE))
    assert {"train", "config", "examples"} <= named
    assert named <= known


def test_every_path_in_the_tree_is_there():
    tree = README.split("## Repository layout")[1].split("```")[1]
    for line in tree.strip().splitlines():
        name = line.split()[0]
        folder = ROOT / "verl" if line.startswith("  ") else ROOT
        assert (folder / name).exists(), name


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_commands_without_network_train_as_printed(tmp_path):
    """No hub and no cache; the accuracy on held-out sums rises as the page says: by more than 0.2."""
    (script,) = [b for b in re.findall(r"```bash\n(.*?)```", README, re.DOTALL) if "data_preprocess/sums.py" in b]
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
